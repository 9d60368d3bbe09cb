"""Two users of one group share a store: each stage of the second reads what the first has made."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.pipeline.conftest import DEADLINE_S, Project, executed

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("setpriv") is None,
        reason="needs to be root, and util-linux",
    ),
]
GROUP = 64321
FIRST, SECOND = 64322, 64323

# In a mount namespace of its own, Python's installation stays reachable though it may lie in root's
# private folder.
AS_USER = """\
set -e
if [ "${PYTHON_BASE#/root/}" != "$PYTHON_BASE" ]; then
  mkdir -p "$HOME/python"
  mount --bind "$PYTHON_BASE" "$HOME/python"
  mount -t tmpfs -o mode=755 none /root
  mkdir -p "$PYTHON_BASE"
  mount --bind "$HOME/python" "$PYTHON_BASE"
fi
umask 002
exec setpriv --reuid="$1" --regid="$2" --clear-groups -- "${@:3}"
"""


@dataclass
class User:
    """A user with a clone of the project, and the shared store."""

    uid: int
    home: Path
    store: Path

    @property
    def clone(self) -> Project:
        return Project(self.home / "clone")

    def snakemake(self, *arguments: str) -> str:
        """What snakemake prints, run as this user in the clone; it has to end well."""
        command = [
            "unshare",
            "--mount",
            "bash",
            "-c",
            AS_USER,
            "bash",
            str(self.uid),
            str(GROUP),
            "snakemake",
            *arguments,
        ]
        variables = {
            "PATH": self.clone.environment["PATH"],
            "HOME": str(self.home),
            "USER": str(self.uid),
            "OMP_NUM_THREADS": self.clone.environment["OMP_NUM_THREADS"],
            "PYTHON_BASE": sys.base_prefix,
        }
        done = subprocess.run(
            command,
            cwd=self.home / "clone",
            env={**variables, "PIPELINE_STORE": str(self.store)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE_S,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that others may enter, unlike those of pytest."""
    folder = Path(tempfile.mkdtemp(prefix="two-users-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def user(uid: int, folder: Path) -> User:
    made = User(uid, folder / str(uid), folder / "shared" / "store")
    project = made.clone
    project.edit("max_rows: 400", "max_rows: 200")
    project.edit("epochs: 2", "epochs: 1")
    for path in (made.home, *made.home.rglob("*")):
        os.chown(path, uid, GROUP, follow_symlinks=False)
    return made


@pytest.mark.slow
def test_the_second_user_goes_on_from_what_the_first_has_made(shared: Path) -> None:
    """As docs/store.md says: a folder with setgid for the group, and umask 002."""
    folder = shared / "shared"
    folder.mkdir()
    os.chown(folder, FIRST, GROUP)
    folder.chmod(0o2775)
    first, second = user(FIRST, shared), user(SECOND, shared)

    first.snakemake("train")
    assert executed(second.snakemake()) == ["evaluate", "evaluate", "merge", "report"]
    second.clone.edit("lr: 4.0e-3", "lr: 2.0e-3")
    assert "train" in executed(second.snakemake("train"))
    assert executed(first.snakemake("-n")) == []

    private = [
        path
        for path in folder.rglob("*")
        if path.stat().st_gid != GROUP or not path.stat().st_mode & 0o020
    ]
    assert private == []
