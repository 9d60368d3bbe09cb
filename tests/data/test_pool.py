import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pipeline_lib.core.errors import DataError
from pipeline_lib.data.pool import TASKS_PER_WORKER, Limits, LossCause, Pool, Task, WorkerLost
from tests.processes import running, wait_for, workers_alive

from .pool_tasks import STATE, Add, Harm, Look, crash_while_loading, fail_to_load, load

TIGHT = Limits(memory_bytes=300 << 20, cpu_s=1.5, silence_s=600.0)


@pytest.fixture
def forked_workers() -> None:
    """Here they are spawned, as in a pipeline."""


@pytest.fixture(autouse=True)
def no_orphans() -> Iterator[None]:
    yield
    assert workers_alive() == []


@pytest.mark.parametrize("workers", [1, 3])
def test_results_come_in_the_order_of_the_tasks(workers: int) -> None:
    tasks = [Add(number, 0.02 if number % 4 == 0 else 0.0) for number in range(30)]
    with Pool(load, workers) as pool:
        assert list(pool.map(tasks)) == [STATE + number for number in range(30)]
        assert list(pool.map([Add(5)])) == [STATE + 5]
        assert list(pool.map([])) == []


def test_few_tasks_are_on_their_way() -> None:
    read = 0

    def tasks() -> Iterator[Add]:
        nonlocal read
        for read in range(1, 101):  # noqa: B007 - seen from outside
            yield Add(read)

    with Pool(load, 2) as pool:
        for taken, _ in enumerate(pool.map(tasks())):
            assert read <= taken + 2 * TASKS_PER_WORKER + 1
    assert read == 100


@pytest.mark.parametrize(
    ("kind", "cause", "detail"),
    [
        ("cpu", LossCause.CPU, "more than 1.5 s of CPU time"),
        ("memory", LossCause.MEMORY, "more than 0.3 GiB of memory"),
        ("abort", LossCause.MEMORY, "more than 0.3 GiB of memory"),
        ("killed", LossCause.KILLED, r"killed from outside \(SIGKILL\), at [\d,]+ MB"),
        ("crashed", LossCause.CRASHED, "SIGSEGV"),
    ],
)
def test_a_lost_worker_says_what_it_was_at(kind: str, cause: LossCause, detail: str) -> None:
    taken = []
    tasks: list[Task[int, int]] = [Add(0), Add(1), Add(2, 0.1), Harm(kind), *map(Add, range(50))]
    with Pool(load, 2, TIGHT) as pool, pytest.raises(WorkerLost, match=detail) as caught:
        for result in pool.map(tasks):
            taken.append(result)
    # what came before is not lost, and what is named does not vary
    assert taken == [STATE, STATE + 1, STATE + 2]
    assert (caught.value.cause, caught.value.task, caught.value.position) == (cause, Harm(kind), 7)


def test_a_task_may_run_in_the_place_of_one_whose_worker_was_lost() -> None:
    lost: list[WorkerLost] = []

    def instead(loss: WorkerLost) -> Task[int, int]:
        lost.append(loss)
        return Harm("memory") if loss.task == Harm("cpu") else Add(-STATE)

    tasks: list[Task[int, int]] = [Add(0), Harm("cpu"), *map(Add, range(1, 12)), Harm("abort")]
    with Pool(load, 2, TIGHT) as pool:
        found = list(pool.map(tasks, instead))
    assert found == [STATE, 0, *(STATE + number for number in range(1, 12)), 0]
    assert {(loss.cause, loss.position) for loss in lost} == {
        (LossCause.CPU, 7),
        (LossCause.MEMORY, 7),
    }
    assert len(lost) == 3


def test_a_worker_without_progress_is_given_up() -> None:
    limits = Limits(silence_s=3)
    tasks: list[Task[int, int]] = [Add(0), Harm("silent")]
    with (
        Pool(load, 2, limits) as pool,
        pytest.raises(WorkerLost, match="no progress in 3 s") as caught,
    ):
        list(pool.map(tasks))
    assert (caught.value.cause, caught.value.position) == (LossCause.SILENT, 7)


def test_what_a_task_raises_is_raised_in_its_place() -> None:
    taken = []
    tasks: list[Task[int, int]] = [Add(0, 0.05), Harm("refused"), Harm("cpu")]
    with Pool(load, 2) as pool, pytest.raises(DataError, match="row 7 is bad"):
        for result in pool.map(tasks):
            taken.append(result)
    assert taken == [STATE]


def test_a_bug_in_a_task_is_no_fault_of_the_data(capfd: pytest.CaptureFixture[str]) -> None:
    with (
        Pool(load, 1) as pool,
        pytest.raises(RuntimeError, match="exit code 1; its traceback is above"),
    ):
        list(pool.map([Harm("bug")]))
    assert "ZeroDivisionError: a bug of ours" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("loading", "error", "message"),
    [
        (fail_to_load, DataError, "no such model"),
        (crash_while_loading, WorkerLost, "killed from outside"),
    ],
)
def test_a_worker_that_cannot_load_is_one_error(
    loading: Callable[[], int], error: type[Exception], message: str
) -> None:
    with Pool(loading, 2) as pool, pytest.raises(error, match=message):
        list(pool.map([Add(0)]))


def test_a_worker_has_one_thread_and_leaves_no_core() -> None:
    with Pool(load, 1) as pool:
        (found,) = pool.map([Look()])
    assert (found["threads"], found["core"]) == (1, (0, 0))


def _hold_a_pool(path: Path) -> None:
    with Pool(load, 2) as pool:
        list(pool.map([Add(0)] * 4))
        path.write_text(" ".join(map(str, workers_alive())))
        list(pool.map([Add(0, 3600.0)] * 2))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_worker_outlives_its_parent(tmp_path: Path, number: signal.Signals) -> None:
    path = tmp_path / "workers"
    with running(_hold_a_pool, path) as parent:
        wait_for(lambda: path.exists() and path.read_text() != "", "the pool at work")
        workers = [psutil.Process(int(pid)) for pid in path.read_text().split()]
        assert len(workers) == 2
        os.kill(parent.pid or 0, number)
        parent.join()
    wait_for(lambda: not any(is_alive(worker) for worker in workers), "the end of the workers")


def is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
