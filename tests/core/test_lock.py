import errno
import json
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.context import ForkProcess
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any

import pytest

from pipeline_lib.core import lock
from pipeline_lib.core.errors import DiskFull, LockLost
from pipeline_lib.core.lock import Lock, locked
from tests.locks import hold as hold_as_test
from tests.locks import take_over
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

    expected = (
        f"waiting for process {owner.pid} on {socket.gethostname()}, which is doing this "
        f"already ({path})"
    )
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


def is_taken_over(path: Path, owner: dict[str, Any], age_s: float, patience_s: float) -> bool:
    """Whether somebody takes the lock of `owner`, last alive `age_s` ago, in `patience_s`."""
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


def test_the_heartbeat_of_a_process_that_is_there_does_not_matter(
    tmp_path: Path, me: dict[str, Any]
) -> None:
    """A stopped process (a debugger, a suspended machine) comes back and goes on."""
    assert is_held(tmp_path / "lock", me, age_s=1e6)


@pytest.mark.parametrize(
    "change", [{"process_start": "1"}, {"pid": 2**22 + 1}], ids=["reused pid", "no such process"]
)
def test_a_dead_process_loses_its_lock_at_once(
    tmp_path: Path, me: dict[str, Any], change: dict[str, Any]
) -> None:
    assert is_free(tmp_path / "lock", me | change)


# A heartbeat of 0.1 s, and an owner that counts as dead after 2 s of silence, or 1 s if it is old.
BEAT_S, DEAD_S, OLD_DEAD_S = 0.1, 2.0, 1.0


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "DEAD_AFTER_S", DEAD_S)
    monkeypatch.setattr(lock, "DEAD_IF_OLD_AFTER_S", OLD_DEAD_S)


ELSEWHERE = {"host": "elsewhere", "boot_id": "theirs"}
UNKNOWN_OWNERS = {
    "another boot": {"boot_id": "this machine restarted, or another one of its name"},
    "another container on this host": {"pid_namespace": "pid:[1]", "pid": 2**22 + 1},
    "no pid": {"pid": None},
}


def seconds_until_taken(
    path: Path, owner: dict[str, Any], beat: Callable[[], None], patience_s: float
) -> float | None:
    """When somebody takes the lock of `owner`, who beats by `beat`; None after `patience_s`."""
    path.write_text(json.dumps(owner))
    beat()
    taken, begun_s = path.with_name("taken"), monotonic()
    with running(hold, path, taken, 0.0):
        while monotonic() - begun_s < patience_s:
            if taken.exists():
                return monotonic() - begun_s
            sleep(BEAT_S)
            with suppress(FileNotFoundError):
                beat()
    return None


def beats_by_clock(path: Path, offset_s: float) -> Callable[[], None]:
    """The heartbeat of a machine whose clock is `offset_s` ahead."""
    return lambda: os.utime(path, (time() + offset_s, time() + offset_s))


def silent_since(path: Path, age_s: float) -> Callable[[], None]:
    """A heartbeat that stands still."""
    last_s = time() - age_s
    return lambda: os.utime(path, (last_s, last_s))


@pytest.mark.parametrize(
    ("change", "offset_s"),
    [
        pytest.param(ELSEWHERE, 0.0, id="same clock"),
        pytest.param(ELSEWHERE, 3600.0, id="ahead"),
        pytest.param(ELSEWHERE, -3600.0, id="behind"),
        *(pytest.param(change, 0.0, id=name) for name, change in UNKNOWN_OWNERS.items()),
    ],
)
@pytest.mark.usefixtures("fast")
def test_an_owner_elsewhere_lives_while_its_heartbeat_moves_whatever_its_clock(
    tmp_path: Path, me: dict[str, Any], change: dict[str, Any], offset_s: float
) -> None:
    path = tmp_path / "lock"
    assert (
        seconds_until_taken(path, me | change, beats_by_clock(path, offset_s), 1.5 * DEAD_S) is None
    )


@pytest.mark.parametrize(
    ("change", "age_s", "after_s"),
    [
        pytest.param(ELSEWHERE, 0.0, OLD_DEAD_S, id="just now"),
        pytest.param(ELSEWHERE, -3600.0, DEAD_S, id="in the future"),
        *(
            pytest.param(change, 3600.0, OLD_DEAD_S, id=name)
            for name, change in UNKNOWN_OWNERS.items()
        ),
    ],
)
@pytest.mark.usefixtures("fast")
def test_an_owner_elsewhere_is_dead_once_its_heartbeat_stood_still(
    tmp_path: Path, me: dict[str, Any], change: dict[str, Any], age_s: float, after_s: float
) -> None:
    path = tmp_path / "lock"
    taken_s = seconds_until_taken(path, me | change, silent_since(path, age_s), DEADLINE_S)
    assert taken_s is not None
    assert taken_s >= after_s


@pytest.mark.usefixtures("fast")
def test_who_does_not_wait_takes_the_lock_of_an_owner_that_is_long_dead(
    tmp_path: Path, me: dict[str, Any]
) -> None:
    """Commands that refuse to wait end when told of the owner: they watch a heartbeat first."""
    path, said = tmp_path / "lock", list[str]()
    path.write_text(json.dumps(me | {"host": "elsewhere"}))
    os.utime(path, (0, 0))
    with locked(path, said.append, POLL_S):
        assert said == []


@pytest.mark.usefixtures("fast")
def test_a_lock_file_that_does_not_read_counts_by_its_age(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text("{")
    with locked(path, silent, POLL_S):
        assert owner_of(path)["pid"] == os.getpid()


@pytest.mark.root
def test_a_full_disk_leaves_no_lock_file(small_disk: Path) -> None:
    (small_disk / "locks").mkdir()
    with suppress(OSError):
        (small_disk / "rest").write_bytes(bytes(2_000_000))
    with pytest.raises(DiskFull), locked(small_disk / "locks" / "digest", silent):
        pass
    assert list((small_disk / "locks").iterdir()) == []


@pytest.mark.root
@pytest.mark.usefixtures("no_hard_links")
def test_a_full_disk_without_hard_links_leaves_no_lock_file(small_disk: Path) -> None:
    path = small_disk / "digest"
    with suppress(OSError):
        (small_disk / "rest").write_bytes(bytes(2_000_000))
    with pytest.raises(OSError, match="No space left"):
        lock._create_without_link(path, "{}")
    assert not path.exists()


def test_an_error_of_the_file_server_does_not_end_the_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "HEARTBEAT_S", 0.01)
    renew, failed = Lock.renew, list[Lock]()

    def fail_once(self: Lock) -> None:
        if not failed:
            failed.append(self)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        renew(self)

    monkeypatch.setattr(Lock, "renew", fail_once)
    path = tmp_path / "lock"
    with locked(path, silent):
        wait_for(lambda: bool(failed), "the error")
        os.utime(path, (0, 0))
        wait_for(lambda: path.stat().st_mtime > 0, "a heartbeat after it")


def test_the_owner_keeps_its_heartbeat_going(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "HEARTBEAT_S", 0.01)
    path = tmp_path / "lock"
    with locked(path, silent):
        os.utime(path, (0, 0))
        wait_for(lambda: time() - path.stat().st_mtime < 60, "a heartbeat")


def test_where_times_are_set_by_name_only_the_heartbeat_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_name = os.utime

    def refuse_descriptors(file: int | Path) -> None:
        if isinstance(file, int):
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
        by_name(file)

    ours = hold_as_test(tmp_path / "lock")
    os.utime(ours.path, (0, 0))
    monkeypatch.setattr(os, "utime", refuse_descriptors)
    ours.renew()

    assert ours.path.stat().st_mtime > 0


def test_an_owner_that_lost_its_lock_leaves_the_next_one_alone(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with (
        pytest.raises(LockLost, match="was taken over by process 4711 on elsewhere"),
        locked(path, silent),
    ):
        take_over(path)

    assert owner_of(path)["token"] == "theirs"


def test_what_fails_after_the_lock_was_lost_failed_for_that(tmp_path: Path) -> None:
    """The next owner sweeps what it finds half done."""
    path = tmp_path / "lock"
    with pytest.raises(LockLost), locked(path, silent):
        take_over(path)
        (tmp_path / "swept").read_text()


def lose(path: Path, how: Callable[[Path], object], said: Path) -> None:
    """Hold the lock, lose it, and be stuck."""
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    with locked(path, silent):
        how(path)
        sleep(600)


@pytest.mark.parametrize(
    ("how", "told"),
    [(take_over, "was taken over by process 4711 on elsewhere"), (Path.unlink, "was removed")],
    ids=["taken over", "removed"],
)
def test_an_owner_that_lost_its_lock_ends_whatever_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Callable[[Path], object], told: str
) -> None:
    monkeypatch.setattr(lock, "HEARTBEAT_S", 0.05)
    path, said = tmp_path / "lock", tmp_path / "said"
    with running(lose, path, how, said) as owner:
        owner.join(DEADLINE_S)
        assert owner.exitcode == 75

    [error, code] = said.read_text().splitlines()
    assert error.startswith(f"error: the lock {path} {told}")
    assert code == "exit code: 75"


def lose_unread(path: Path) -> None:
    """Hold the lock, lose it, and be stuck in a write that nobody reads, as standard error."""
    _, pipe = os.pipe()
    os.dup2(pipe, 2)
    with locked(path, silent):
        take_over(path)
        while True:
            os.write(pipe, bytes(4096))


def test_an_owner_whose_output_nobody_reads_ends_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(lock, "LAST_WORDS_S", 0.1)
    with running(lose_unread, tmp_path / "lock") as owner:
        owner.join(DEADLINE_S)
        assert owner.exitcode == 75


def test_the_heartbeat_of_the_next_owner_is_its_own(tmp_path: Path) -> None:
    ours = hold_as_test(tmp_path / "lock")
    take_over(ours.path)
    os.utime(ours.path, (0, 0))

    with pytest.raises(LockLost):
        ours.renew()

    assert ours.path.stat().st_mtime == 0


def test_a_process_that_works_for_the_owner_ends_when_that_loses_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "HEARTBEAT_S", 0.05)
    ours = hold_as_test(tmp_path / "lock")

    def work() -> None:
        ours.end_process_when_lost()
        sleep(600)

    with running(work) as helper:
        helper.join(0.3)
        assert helper.is_alive()
        take_over(ours.path)
        helper.join(DEADLINE_S)
        assert helper.exitcode == 75


@pytest.fixture
def no_hard_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on FAT, which Linux may not know here."""

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)


@pytest.mark.usefixtures("no_hard_links")
def test_without_hard_links_no_update_is_lost_either(tmp_path: Path) -> None:
    path, history, acknowledged = tmp_path / "lock", tmp_path / "history", tmp_path / "acknowledged"
    history.write_text("")
    workers = [
        FORK.Process(target=add_lines, args=(path, history, acknowledged, f"worker{number}", 20))
        for number in range(4)
    ]
    for worker in workers:
        worker.start()
    finish([*workers])

    assert sorted(lines_of(history)) == sorted(lines_of(acknowledged))
    assert len(lines_of(history)) == 4 * 20
    assert sorted(entry.name for entry in tmp_path.iterdir() if entry.name.startswith("lock")) == []


@pytest.mark.usefixtures("no_hard_links", "fast")
def test_without_hard_links_a_dead_owner_is_replaced_too(tmp_path: Path) -> None:
    path, held = tmp_path / "lock", tmp_path / "held"
    with running(hold, path, held, 600.0) as owner:
        wait_for(held.exists, "taking the lock")
        owner.kill()
        owner.join()
        with locked(path, silent, POLL_S):
            assert owner_of(path)["pid"] == os.getpid()

    path.touch()  # of an owner that has not written its name yet
    with running(hold, path, tmp_path / "taken", 0.0) as waiter:
        waiter.join(0.3)
        assert not (tmp_path / "taken").exists()
        os.utime(path, (0, 0))  # it was killed before it could
        finish([waiter])


def test_a_link_that_is_there_since_the_server_was_asked_twice_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def link_twice(source: Path, target: Path) -> None:
        """As a client of NFS that repeats a request whose answer was lost."""
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", link_twice)
    said = list[str]()
    with running(hold, tmp_path / "lock", tmp_path / "held", 0.0) as owner:
        finish([owner])
    with locked(tmp_path / "lock", said.append, POLL_S):
        assert said == []


def test_a_late_remover_leaves_the_next_owner_alone(tmp_path: Path, me: dict[str, Any]) -> None:
    """Two waiters see the same dead owner; one holds the lock before the other removes it."""
    path = tmp_path / "lock"
    dead = me | {"pid": 2**22 + 1, "token": "dead"}
    path.write_text(json.dumps(dead))
    beat_ns = path.stat().st_mtime_ns
    with locked(path, silent, POLL_S):
        mine = owner_of(path)
        lock._remove_dead(path, dead, beat_ns)

        assert owner_of(path) == mine
        assert [entry.name for entry in tmp_path.iterdir()] == ["lock"]


def test_a_heartbeat_at_the_last_moment_saves_the_lock(tmp_path: Path, me: dict[str, Any]) -> None:
    path, owner = tmp_path / "lock", me | {"host": "elsewhere"}
    path.write_text(json.dumps(owner))
    beat_ns = path.stat().st_mtime_ns
    os.utime(path, ns=(beat_ns + 1, beat_ns + 1))
    lock._remove_dead(path, owner, beat_ns)
    assert owner_of(path) == owner
    lock._remove_dead(path, owner, beat_ns + 1)
    assert not path.exists()


def test_only_one_process_at_a_time_removes_a_dead_owner(
    tmp_path: Path, me: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    dead = me | {"pid": 2**22 + 1, "token": "dead"}
    path.write_text(json.dumps(dead))
    os.link(path, tmp_path / "lock.dead-dead")  # as somebody does who is at it

    assert not lock._remove_dead(path, dead, path.stat().st_mtime_ns)
    assert owner_of(path) == dead

    monkeypatch.setattr(lock, "REMOVAL_S", 0.0)  # somebody who was killed over it
    with locked(path, silent, POLL_S):
        assert owner_of(path)["pid"] == os.getpid()


def test_an_exception_releases_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with pytest.raises(ZeroDivisionError), locked(path, silent):
        raise ZeroDivisionError

    assert list(tmp_path.iterdir()) == []
