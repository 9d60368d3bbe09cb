"""One machine's ranks train alike, save when asked, leave no orphan, show an error as one line."""

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline_lib.core.run_folder import WEIGHTS, newest_valid
from pipeline_lib.core.store import verify
from tests.processes import wait_for
from tests.train.conftest import Arena
from tests.train.helpers import assert_same_result
from tests.train.launching import ENDLESS, Stage, make_stage, seal


@pytest.fixture
def stage(arena: Arena) -> Callable[..., Stage]:
    return lambda **settings: make_stage(arena, **settings)


def test_trains_to_the_same_weights(
    stage: Callable[..., Stage], whole: Callable[..., Path]
) -> None:
    made = stage()
    assert made.run() == 0, made.output

    assert "plan of spawn" not in made.output  # the plan stage showed it
    assert "plan.txt" in made.output
    assert_same_result(made.result, whole(2))
    launched = json.loads((made.result / "events.jsonl").read_text().splitlines()[0])
    assert (launched["event"], launched["launcher"]) == ("run.launched", "spawn")
    assert made.processes() == []
    saved = newest_valid(
        made.run_dir / "checkpoints", 1000, lambda _path, reason: pytest.fail(reason)
    )
    assert saved is not None
    assert (made.result / WEIGHTS).exists()
    for path in (made.result / WEIGHTS).iterdir():
        assert path.samefile(saved / WEIGHTS / path.name)  # no byte is written twice
    verify(made.result)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGUSR1, signal.SIGHUP]
)  # test_takeover.py sends SIGTERM
def test_a_signal_saves_and_ends_with_75(
    stage: Callable[..., Stage], number: signal.Signals
) -> None:
    made = stage(ranks=1, save_every_steps=100_000, **ENDLESS)
    process = made.start()
    made.wait_for_step(2)
    process.send_signal(number)

    assert process.wait(120) == 75, made.output
    assert "Traceback" not in made.output
    assert "stopped by a signal after step" in made.output
    [saved] = made.run_dir.glob("checkpoints/step-*")
    assert int(saved.name.removeprefix("step-")) == max(made.steps_done())
    assert made.processes() == []


@pytest.mark.slow
def test_kill_9_of_the_stage_leaves_no_orphan(stage: Callable[..., Stage]) -> None:
    made = stage(ranks=1, **ENDLESS)
    process = made.start()
    made.wait_for_step(2)
    process.kill()
    process.wait()

    wait_for(lambda: made.processes() == [], "the end of all processes")


@pytest.mark.slow
def test_a_killed_rank_is_named(stage: Callable[..., Stage]) -> None:
    made = stage(save_every_steps=2, **ENDLESS)
    process = made.start()
    made.wait_for_checkpoint()
    os.kill(made.rank(1).pid, signal.SIGKILL)

    assert process.wait(120) == 75, made.output
    assert re.search(r"^error: rank 1 ", made.output, re.MULTILINE)
    assert "is saved; run the same command again to continue" in made.output
    assert made.processes() == []


@pytest.mark.slow
def test_an_error_of_a_rank_is_the_message(stage: Callable[..., Stage]) -> None:
    made = stage()
    model = made.arena.model
    folder = made.arena.store.sealed(model)
    (folder / "config.json").write_text('{"model_type": "none"}')
    seal(folder, model.stage, model.digest)

    assert made.run() == 65, made.output
    assert re.search("error: rank [01]: ", made.output), made.output  # of the one that failed first
    assert made.processes() == []
