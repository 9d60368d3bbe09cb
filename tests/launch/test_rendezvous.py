"""Where ranks meet: the address at which rank 0 listens, and the folder of the file."""

import os
import tempfile
import time
from pathlib import Path

import pytest

from pipeline_lib.core.errors import TrainingError
from pipeline_lib.launch import rendezvous
from pipeline_lib.launch.environment import COMPILE_CACHES, compile_caches, private_rendezvous
from pipeline_lib.launch.rendezvous import Rendezvous, own_address
from tests.processes import running, wait_for

INTERFACES = {
    "lo": ["127.0.0.1"],
    "docker0": ["172.17.0.1"],
    "eth0": ["10.0.0.1"],
    "ib0": ["10.1.0.1", "fd00::1"],
}
NAMES = {
    "gpu1": ["10.0.0.1"],
    "debian": ["127.0.1.1"],
    "several": ["172.17.0.1", "10.0.0.1"],
    "10.1.0.1": ["10.1.0.1"],
    "127.0.0.2": ["127.0.0.2"],
    "localhost": ["::1", "127.0.0.1"],
    "elsewhere": ["10.9.9.9"],
}


@pytest.mark.parametrize(
    ("address", "interface", "own"),
    [
        ("gpu1", "eth0", "10.0.0.1"),
        ("gpu1", "ib0", "10.0.0.1"),  # the others come by the name
        ("debian", "ib0", "10.1.0.1"),  # others cannot connect to a loopback address
        ("several", "eth0", "10.0.0.1"),
        ("several", "ib0,eth0", "10.0.0.1"),
        ("10.1.0.1", None, "10.1.0.1"),
        ("127.0.0.2", "lo", "127.0.0.2"),
        ("localhost", "lo", "127.0.0.1"),  # this machine has no ::1
        ("elsewhere", "ib0", "10.1.0.1"),
    ],
)
def test_rank_0_listens_where_the_others_reach_it(
    monkeypatch: pytest.MonkeyPatch, address: str, interface: str | None, own: str
) -> None:
    monkeypatch.setattr(rendezvous, "_addresses_by_interface", lambda: INTERFACES)
    monkeypatch.setattr(rendezvous, "_resolved", NAMES.__getitem__)
    assert own_address(address, interface) == own


@pytest.mark.parametrize("address", ["debian", "elsewhere"])
def test_an_address_of_another_machine_is_refused(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setattr(rendezvous, "_addresses_by_interface", lambda: INTERFACES)
    monkeypatch.setattr(rendezvous, "_resolved", NAMES.__getitem__)
    with pytest.raises(TrainingError, match="GLOO_SOCKET_IFNAME"):
        own_address(address, None)


def meeting(file: Path) -> Rendezvous:
    return Rendezvous.from_env({"PIPELINE_RENDEZVOUS": str(file)})


def wait_in_the_folder(left: Path) -> None:
    with private_rendezvous() as variables:
        left.write_text(str(Path(variables["PIPELINE_RENDEZVOUS"]).parent))
        time.sleep(600)


def test_the_folder_of_a_killed_launcher_goes_with_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    long_ago_s = time.time() - 3600
    young = tmp_path / "pipeline-ranks-young"
    young.mkdir()
    with running(wait_in_the_folder, tmp_path / "left") as launcher:
        wait_for(
            lambda: (tmp_path / "left").exists() and bool((tmp_path / "left").read_text()),
            "the folder",
        )
        folder = Path((tmp_path / "left").read_text())
        os.utime(folder, (long_ago_s, long_ago_s))
        with private_rendezvous():
            assert folder.exists()
        launcher.kill()
        launcher.join()
    assert folder.exists()
    with running(wait_as_a_rank, folder / "rendezvous", tmp_path / "rank") as rank:
        wait_for((tmp_path / "rank").exists, "the rank")
        os.utime(folder, (long_ago_s, long_ago_s))
        with private_rendezvous():
            assert folder.exists(), "a rank meets there"
        rank.kill()
    with private_rendezvous():
        assert not folder.exists()
    assert young.exists()


def wait_as_a_rank(file: Path, came: Path) -> None:
    meeting(file).store(0, 1, 5.0)
    came.touch()
    time.sleep(600)


def test_the_file_lies_in_a_folder_of_the_user_alone(tmp_path: Path) -> None:
    with private_rendezvous() as variables:
        folder = Path(variables["PIPELINE_RENDEZVOUS"]).parent
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()
    # on another machine than this one
    meeting(tmp_path / "made" / "rendezvous").store(0, 1, 5.0).set("key", "value")
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o700
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(TrainingError, match="cannot meet"):
        meeting(tmp_path / "open" / "rendezvous").store(0, 1, 5.0)


@pytest.mark.parametrize(
    "environ", [{}, {"MASTER_ADDR": "gpu1"}, {"MASTER_ADDR": "gpu1", "MASTER_PORT": "x"}]
)
def test_a_rank_that_no_launcher_started_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(TrainingError, match="PIPELINE_RENDEZVOUS"):
        Rendezvous.from_env(environ).store(0, 2, 5.0)


def test_what_is_compiled_lies_where_nobody_else_can_write(tmp_path: Path) -> None:
    """Torch unpickles its cache, and runs what it finds there."""
    environ = {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
    found = compile_caches(environ)
    assert found.keys() == COMPILE_CACHES.keys()
    assert all(Path(folder).stat().st_mode & 0o777 == 0o700 for folder in found.values())
    assert all(Path(folder).is_relative_to(tmp_path / "home") for folder in found.values())

    own, others = tmp_path / "own", tmp_path / "others"
    own.mkdir()
    others.mkdir()
    others.chmod(0o777)
    made = compile_caches(
        environ | {"TORCHINDUCTOR_CACHE_DIR": str(own), "TRITON_CACHE_DIR": str(others)}
    )
    assert made["TORCHINDUCTOR_CACHE_DIR"] == str(own)
    assert made["TRITON_CACHE_DIR"] == found["TRITON_CACHE_DIR"]

    if os.geteuid() == 0:
        os.chown(own, 65534, 65534)
        assert compile_caches(environ | {"TORCHINDUCTOR_CACHE_DIR": str(own)}) == found
    nowhere = compile_caches({})
    assert all(Path(folder).stat().st_mode & 0o777 == 0o700 for folder in nowhere.values())
