import json
import os
import signal
import socket
from multiprocessing.context import ForkProcess
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any

import pytest

from pipeline_lib.base import lock
from pipeline_lib.base.lock import locked
from tests.processes import DEADLINE_S, FORK, finish, lines_of, running, wait_for

POLL_S = 0.002


def silent(text: str) -> None:
    """Say nothing."""


def hold(path: Path, held: Path, seconds: float) -> None:
    with locked(path, silent, POLL_S):
        held.write_text(str(os.getpid()))
        sleep(seconds)
    held.write_text("released")


def owner_of(path: Path) -> dict[str, Any]:
    owner: dict[str, Any] = json.loads(path.read_text())
    return owner


@pytest.fixture
def me(tmp_path: Path) -> dict[str, Any]:
    """What this process writes into a lock that it holds."""
    with locked(tmp_path / "probe", silent):
        return owner_of(tmp_path / "probe")


def add_lines(path: Path, history: Path, acknowledged: Path, name: str, count: int) -> None:
    """Read, wait, write: whoever else writes meanwhile loses a line or has its own lost."""
    for number in range(count):
        line = f"{name}-{number}\n"
        with locked(path, silent, POLL_S):
            before = history.read_text()
            sleep(0.001)
            draft = history.with_name(f"draft-{name}")
            draft.write_text(before + line)
            draft.replace(history)
        with acknowledged.open("a") as file:
            file.write(line)


def test_no_update_is_lost_though_owners_are_killed(tmp_path: Path) -> None:
    path, history, acknowledged = tmp_path / "lock", tmp_path / "history", tmp_path / "acknowledged"
    history.write_text("")

    def worker(name: str, count: int) -> ForkProcess:
        return FORK.Process(target=add_lines, args=(path, history, acknowledged, name, count))

    victims = [worker(f"victim{number}", 1_000_000) for number in range(4)]
    survivors = [worker(f"survivor{number}", 20) for number in range(3)]
    for process in victims + survivors:
        process.start()
    for victim in victims:
        wait_for(lambda pid=victim.pid: _owner_pid(path) == pid, "the victim's turn")  # type: ignore[misc]
        victim.kill()
        victim.join()
    finish([*survivors])

    lines = lines_of(history)
    assert set(lines_of(acknowledged)) <= set(lines), "an update was lost"
    assert len(lines) == len(set(lines))
    assert sum(line.startswith("survivor") for line in lines) == 3 * 20


def _owner_pid(path: Path) -> int | None:
    try:
        pid: int = owner_of(path)["pid"]
    except (OSError, ValueError):
        return None
    return pid


def test_a_living_owner_is_waited_for_and_announced_once(tmp_path: Path) -> None:
    path, held, said = tmp_path / "lock", tmp_path / "held", list[str]()
    with running(hold, path, held, 0.3) as owner:
        wait_for(held.exists, "taking the lock")
        with locked(path, said.append, POLL_S):
            assert held.read_text() == "released"

    expected = f"waiting for process {owner.pid} on {socket.gethostname()}, which is doing this already ({path})"
    assert said == [expected]


def test_the_lock_of_a_killed_owner_is_taken_at_once(tmp_path: Path) -> None:
    path, held = tmp_path / "lock", tmp_path / "held"
    with running(hold, path, held, 600.0) as owner:
        wait_for(held.exists, "taking the lock")
        with running(hold, path, tmp_path / "waiter", 0.0) as waiter:
            sleep(0.2)
            assert not (tmp_path / "waiter").exists(), "two processes hold the lock"
            os.kill(owner.pid or 0, signal.SIGKILL)
            killed_s = monotonic()
            finish([waiter])

    assert monotonic() - killed_s < 5.0 < lock.DEAD_AFTER_S


def test_an_exception_releases_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with pytest.raises(ZeroDivisionError), locked(path, silent):
        raise ZeroDivisionError

    assert list(tmp_path.iterdir()) == []


def is_taken_over(path: Path, owner: dict[str, Any], age_s: float, patience_s: float) -> bool:
    """Whether somebody takes the lock of `owner`, whose last heartbeat was `age_s` ago, within `patience_s`."""
    path.write_text(json.dumps(owner))
    os.utime(path, (time() - age_s, time() - age_s))
    taken = path.with_name("taken")
    with running(hold, path, taken, 0.0) as child:
        child.join(patience_s)
        return taken.exists()


def is_held(path: Path, owner: dict[str, Any], age_s: float = 0.0) -> bool:
    return not is_taken_over(path, owner, age_s, patience_s=0.3)


def is_free(path: Path, owner: dict[str, Any], age_s: float = 0.0) -> bool:
    return is_taken_over(path, owner, age_s, patience_s=DEADLINE_S)


def test_a_process_that_is_there_holds_its_lock(tmp_path: Path, me: dict[str, Any]) -> None:
    assert is_held(tmp_path / "lock", me)


def test_the_heartbeat_of_a_process_that_is_there_does_not_matter(tmp_path: Path, me: dict[str, Any]) -> None:
    """A stopped process (a debugger, a suspended machine) comes back and goes on."""
    assert is_held(tmp_path / "lock", me, age_s=1e6)


@pytest.mark.parametrize(
    "change",
    [{"process_start": "1"}, {"boot_id": "another boot"}, {"pid": 2**22 + 1}],
    ids=["reused pid", "machine was restarted", "no such process"],
)
def test_a_dead_process_loses_its_lock_at_once(tmp_path: Path, me: dict[str, Any], change: dict[str, Any]) -> None:
    assert is_free(tmp_path / "lock", me | change)


@pytest.mark.parametrize(
    "change",
    [{"host": "elsewhere", "boot_id": "theirs"}, {"pid_namespace": "pid:[1]", "pid": 2**22 + 1}, {"pid": None}],
    ids=["another host", "another container on this host", "no pid"],
)
def test_an_owner_that_cannot_be_looked_up_counts_by_its_heartbeat(
    tmp_path: Path, me: dict[str, Any], change: dict[str, Any]
) -> None:
    assert is_held(tmp_path / "lock", me | change, age_s=lock.DEAD_AFTER_S / 2)
    assert is_held(tmp_path / "lock", me | change, age_s=-3600.0), "a clock that is ahead kills nobody"
    assert is_free(tmp_path / "lock", me | change, age_s=lock.DEAD_AFTER_S + 1)


def test_a_lock_file_that_does_not_read_counts_by_its_age(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text("{")
    with running(hold, path, tmp_path / "taken", 0.0) as child:
        child.join(0.3)
        assert not (tmp_path / "taken").exists()
        os.utime(path, (0, 0))
        finish([child])

    assert (tmp_path / "taken").read_text() == "released"


def test_the_owner_keeps_its_heartbeat_going(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "HEARTBEAT_S", 0.01)
    path = tmp_path / "lock"
    with locked(path, silent):
        os.utime(path, (0, 0))
        wait_for(lambda: time() - path.stat().st_mtime < 60, "a heartbeat")


def test_an_owner_that_lost_its_lock_leaves_the_next_one_alone(tmp_path: Path, me: dict[str, Any]) -> None:
    path = tmp_path / "lock"
    with locked(path, silent):
        path.write_text(json.dumps(me | {"token": "the next owner"}))

    assert owner_of(path)["token"] == "the next owner"


def test_a_late_remover_leaves_the_next_owner_alone(tmp_path: Path, me: dict[str, Any]) -> None:
    """Two waiters see the same dead owner; one is done and holds the lock before the other begins to remove it."""
    path = tmp_path / "lock"
    dead = me | {"pid": 2**22 + 1, "token": "dead"}
    path.write_text(json.dumps(dead))
    with locked(path, silent, POLL_S):
        mine = owner_of(path)
        lock._remove_dead(path, dead)

        assert owner_of(path) == mine
        assert [entry.name for entry in tmp_path.iterdir()] == ["lock"]


def test_only_one_process_at_a_time_removes_a_dead_owner(
    tmp_path: Path, me: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    dead = me | {"pid": 2**22 + 1, "token": "dead"}
    path.write_text(json.dumps(dead))
    os.link(path, tmp_path / "lock.dead-dead")  # as somebody does who is at it

    assert not lock._remove_dead(path, dead)
    assert owner_of(path) == dead

    monkeypatch.setattr(lock, "REMOVAL_S", 0.0)  # somebody who was killed over it
    with locked(path, silent, POLL_S):
        assert owner_of(path)["pid"] == os.getpid()


def test_a_released_lock_leaves_nothing_behind(tmp_path: Path) -> None:
    assert socket.gethostname() == _held_by(tmp_path / "deep" / "lock")["host"]
    assert list((tmp_path / "deep").iterdir()) == []


def _held_by(path: Path) -> dict[str, Any]:
    with locked(path, silent):
        return owner_of(path)
