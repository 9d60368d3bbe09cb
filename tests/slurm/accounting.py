"""Accounting for a loopback cluster: slurmdbd and a MariaDB of its own, so that sacct answers.

Accounts: `lab`, to which root belongs. Nobody else may submit, and no other account exists.
"""

import secrets
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.slurm import daemons
from tests.slurm.settings import CLUSTER, Plan

ACCOUNT = "lab"
PACKAGES = {
    **dict.fromkeys(("mariadbd", "mariadb-install-db"), "mariadb-server-core"),
    **dict.fromkeys(("sacct", "sacctmgr"), "slurm-client"),
    "my_print_defaults": "mariadb-client-core",  # mariadb-install-db calls it
    "slurmdbd": "slurmdbd",
}
CONFIG = """\
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
DbdHost=localhost
DbdAddr={address}
DbdPort={port}
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={database_port}
StorageUser=slurm
StoragePass={password}
StorageLoc=slurm_acct_db
"""
ACCESS = """\
CREATE DATABASE IF NOT EXISTS slurm_acct_db;
CREATE USER IF NOT EXISTS 'slurm'@'127.0.0.1' IDENTIFIED BY '{password}';
GRANT ALL ON slurm_acct_db.* TO 'slurm'@'127.0.0.1';
"""


def start_database(plan: Plan, environ: Mapping[str, str]) -> None:
    """Make an empty MariaDB in the cluster's folder, and start it for this machine only."""
    folder, password = plan.folder, secrets.token_hex(16)
    _write_private(folder / "access.sql", ACCESS.format(password=password))
    _write_private(
        folder / "slurmdbd.conf",
        CONFIG.format(
            folder=folder,
            address=plan.address,
            port=plan.accounting_port,
            database_port=plan.database_port,
            password=password,
        ),
    )
    data = [
        f"--datadir={folder / 'mysql'}",
        "--user=root",
        "--innodb-log-file-size=8M",
        "--skip-name-resolve",
    ]
    install = [
        "mariadb-install-db",
        "--no-defaults",
        "--auth-root-authentication-method=normal",
        "--skip-test-db",
    ]
    daemons.run(folder, "mariadb-install-db", [*install, *data], environ)
    reach = [
        f"--socket={folder / 'mysql.socket'}",
        "--bind-address=127.0.0.1",
        f"--port={plan.database_port}",
    ]
    quick = [
        "--innodb-buffer-pool-size=64M",
        "--innodb-flush-log-at-trx-commit=2",
        "--skip-log-bin",
    ]
    files = [
        f"--init-file={folder / 'access.sql'}",
        f"--pid-file={folder / 'mysql.pid'}",
        f"--tmpdir={folder}",
    ]
    daemons.start(
        folder, "mariadbd", ["mariadbd", "--no-defaults", *data, *reach, *quick, *files], environ
    )
    daemons.wait_until((folder / "mysql.socket").exists, "mariadbd listens")


def start_slurmdbd(plan: Plan, environ: Mapping[str, str]) -> None:
    """Start slurmdbd, and wait until it answers."""
    daemons.start(
        plan.folder, "slurmdbd", ["slurmdbd", "-D"], {**environ, "SLURM_CONF": str(plan.config)}
    )

    def answers() -> bool:
        asked = ["sacctmgr", "--noheader", "show", "cluster"]
        return (
            subprocess.run(
                asked, env=environ, capture_output=True, timeout=daemons.DEADLINE_S
            ).returncode
            == 0
        )

    daemons.wait_until(answers, "slurmdbd answers")


def add_accounts(call: Callable[..., str]) -> None:
    """Make the one account, with root in it."""
    if (
        CLUSTER
        not in call(
            "sacctmgr", "--noheader", "--parsable2", "show", "cluster", "format=cluster"
        ).split()
    ):
        call("sacctmgr", "--immediate", "add", "cluster", CLUSTER)
    call(
        "sacctmgr",
        "--immediate",
        "add",
        "account",
        ACCOUNT,
        f"cluster={CLUSTER}",
        "description=tests",
    )
    call(
        "sacctmgr", "--immediate", "add", "user", "root", f"account={ACCOUNT}", f"cluster={CLUSTER}"
    )


def _write_private(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text)
