import threading
from pathlib import Path

import pytest

from pipeline_lib.core.errors import DataError, HubError
from pipeline_lib.hub import snapshot
from pipeline_lib.hub.repository import Arrived, RemoteFile
from pipeline_lib.hub.snapshot import Transfer
from tests.processes import wait_for

FILES = [RemoteFile(str(number), number * 100, "sha256", "0" * 64) for number in range(1, 21)]


def silent(here: int, total: int) -> None:
    """Say nothing."""


def test_all_files_come_the_largest_first() -> None:
    order: list[str] = []
    told: list[tuple[int, int]] = []

    def bring(file: RemoteFile, arrived: Arrived) -> Path:
        order.append(file.name)
        arrived(file.size)
        return Path(file.name)

    paths = Transfer(bring, "fetching").run(FILES, lambda here, total: told.append((here, total)))
    assert paths == {file.name: Path(file.name) for file in FILES}
    assert order[0] == "20"
    assert told[-1][1] == sum(file.size for file in FILES)
    assert all(here <= total for here, total in told)
    assert Transfer(bring, "fetching").run([], silent) == {}


def test_the_first_failure_ends_all() -> None:
    ended = threading.Event()

    def bring(file: RemoteFile, arrived: Arrived) -> Path:
        if file.name == "7":
            raise DataError("no")
        try:
            while True:
                arrived(0)
        finally:
            ended.set()

    with pytest.raises(DataError, match="^no$"):
        Transfer(bring, "fetching").run(FILES[4:8], silent)
    wait_for(ended.is_set, "the end of the threads that were left behind")


def test_progress_that_is_too_slow_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "EXTRA_S", 0.1)

    def bring(file: RemoteFile, arrived: Arrived) -> Path:
        while True:
            arrived(0)

    with pytest.raises(
        HubError, match=r"fetching: slower than 0\.1 MB/s for more than 0 s; run again"
    ):
        Transfer(bring, "fetching").run(FILES[:1], silent)
