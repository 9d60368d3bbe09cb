"""Training with trackers gives what training without them gives."""

from pathlib import Path

import pytest

from pipeline_lib.core.files import write_text
from tests.tracking.reading import tensorboard
from tests.train.conftest import Arena, arena
from tests.train.helpers import digest_of, load_weights, losses
from tests.train.launching import make_stage

pytestmark = pytest.mark.slow

__all__ = ["arena"]


def test_a_tracker_that_works_shows_the_run_and_one_that_fails_changes_nothing(
    arena: Arena, tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard")
    shown = make_stage(arena, ranks=1, trackers=("tensorboard",), replica="shown")
    failing = make_stage(arena, ranks=1, trackers=("tensorboard", "wandb"), replica="failing")
    write_text(
        failing.run_dir / "tracking" / "tensorboard", "a file where the tracker wants a folder"
    )
    first, second = shown.start(), failing.start()

    assert first.wait(200) == 0, shown.output
    assert second.wait(200) == 0, failing.output
    steps, values = zip(
        *tensorboard(shown.run_dir / "tracking" / "tensorboard").points["train/loss"], strict=True
    )
    assert list(values) == pytest.approx(losses(shown.result))
    assert list(steps) == list(range(1, len(values) + 1))
    assert failing.output.count("tracking: tensorboard failed and is left out (") == 1
    assert digest_of(load_weights(failing.result)) == digest_of(load_weights(shown.result))
    assert shown.processes() + failing.processes() == []
