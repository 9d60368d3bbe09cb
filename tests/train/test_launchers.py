"""Every launcher trains the same, saves when asked to, leaves no orphan, and shows the error of a rank as one line."""

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.processes import wait_for
from tests.train.conftest import Arena
from tests.train.helpers import assert_same_result
from tests.train.launching import Stage, make_stage, seal


@pytest.fixture
def stage(arena: Arena) -> Callable[..., Stage]:
    return lambda launcher, **settings: make_stage(arena, launcher, **settings)


def test_trains_to_the_same_weights(stage: Callable[..., Stage], whole: Callable[..., Path]) -> None:
    """As accelerate and deepspeed do in jobs of SLURM, which tests/slurm sees."""
    made = stage("torchrun")
    assert made.run() == 0, made.output

    assert "plan of torchrun" not in made.output  # the plan stage showed it
    assert "plan.txt" in made.output
    assert_same_result(made.result, whole(2))
    launched = json.loads((made.result / "events.jsonl").read_text().splitlines()[0])
    assert (launched["event"], launched["launcher"]) == ("run.launched", "torchrun")
    assert made.processes() == []


@pytest.mark.slow
@pytest.mark.parametrize(  # test_takeover.py sends SIGTERM by torchrun
    ("launcher", "number"),
    [("torchrun", signal.SIGUSR1), ("accelerate", signal.SIGTERM), ("deepspeed", signal.SIGTERM)],
)
def test_a_signal_saves_and_ends_with_75(stage: Callable[..., Stage], launcher: str, number: signal.Signals) -> None:
    made = stage(launcher, epochs=1000, save_every_steps=100_000)
    process = made.start()
    made.wait_for_step(2)
    process.send_signal(number)

    assert process.wait(120) == 75, made.output
    assert "Traceback" not in made.output.replace(_traceback_of(launcher, made.output), "")
    assert "stopped by a signal after step" in made.output
    [saved] = made.run_dir.glob("checkpoints/step-*")
    assert int(saved.name.removeprefix("step-")) == max(made.steps_done())
    assert made.processes() == []


def _traceback_of(launcher: str, output: str) -> str:
    """Accelerate shows a traceback of its own for whatever its ranks end with."""
    return output[output.find("Traceback") :] if launcher == "accelerate" else ""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])  # below accelerate's launcher is torchrun's
def test_kill_9_of_the_stage_leaves_no_orphan(stage: Callable[..., Stage], launcher: str) -> None:
    made = stage(launcher, epochs=1000)
    process = made.start()
    made.wait_for_step(2)
    process.kill()
    process.wait()

    wait_for(lambda: made.processes() == [], "the end of all processes")


@pytest.mark.slow
def test_kill_9_of_the_launcher_leaves_no_orphan(stage: Callable[..., Stage]) -> None:
    """DeepSpeed has a launcher below the one that is killed, which looks at its ranks once in a while."""
    made = stage("deepspeed", epochs=1000)
    process = made.start()
    made.wait_for_step(2)
    [started] = [child for child in psutil.Process(process.pid).children() if "deepspeed" in " ".join(child.cmdline())]
    started.kill()

    assert process.wait(120) == 75, made.output
    wait_for(lambda: made.processes() == [], "the end of all processes")
    assert "error: deepspeed was killed by SIGKILL, and its ranks with it" in made.output


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate", "deepspeed"])
def test_a_killed_rank_is_named(stage: Callable[..., Stage], launcher: str) -> None:
    made = stage(launcher, epochs=1000, save_every_steps=2)
    process = made.start()
    made.wait_for_checkpoint()
    victim = made.rank(1)
    os.kill(victim.pid, signal.SIGKILL)

    assert process.wait(120) == 75, made.output
    assert re.search(r"^error: rank (0 or )?1 ", made.output, re.MULTILINE)  # accelerate may end the other as fast
    assert "is saved; run the same command again to continue" in made.output
    assert made.processes() == []


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])  # accelerate's exit code is read as DeepSpeed's is
def test_an_error_of_a_rank_is_the_message(stage: Callable[..., Stage], launcher: str) -> None:
    made = stage(launcher)
    model = made.arena.model
    folder = made.arena.store.sealed(model)
    (folder / "config.json").write_text('{"model_type": "none"}')
    seal(folder, model.stage, model.digest)

    assert made.run() == 65, made.output
    assert re.search("error: rank [01]: ", made.output), made.output  # of the one that failed first
    assert made.processes() == []
