import argparse
import errno
import os

import pytest

from pipeline_lib.cli import main as command_line
from pipeline_lib.core import errors


def test_exit_codes_are_part_of_the_surface() -> None:
    """Batch scripts branch on these numbers."""
    kinds = _all_kinds(errors.PipelineError)
    codes = {kind.__name__: kind.exit_code for kind in kinds if kind.__module__ == errors.__name__}

    assert codes == {
        "PipelineError": 1,
        "ConfigError": 2,
        "DataError": 65,
        "IntegrityError": 66,
        "HubError": 69,
        "HubOutOfReach": 69,
        "ServerError": 69,
        "ServedDiffers": 76,
        "NotToShip": 77,
        "TooFewQuestions": 79,
        "TrainingError": 70,
        "Diverged": 70,
        "Unreadable": 74,
        "DiskFull": 74,
        "Interrupted": 75,
        "PeerLost": 75,
        "LockLost": 75,
    }


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        Exception("No space left on device (os error 28)"),
    ],
    ids=["Python", "Rust"],
)
def test_a_full_disk_is_no_bug_wherever_it_is_met(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def fail(_: argparse.Namespace) -> None:
        raise error

    parser = argparse.ArgumentParser()
    parser.set_defaults(command=fail)
    monkeypatch.setattr(command_line, "_parsed", lambda argv: parser.parse_args([]))
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert ended.value.code == errors.DiskFull.exit_code
    assert "the disk is full" in capsys.readouterr().err


def _all_kinds(kind: type[errors.PipelineError]) -> list[type[errors.PipelineError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in _all_kinds(child))]


@pytest.mark.parametrize(
    ("problems", "text"),
    [
        (["a: bad"], "x.yaml: 1 problem\n  - a: bad"),
        (["a: bad", "b: worse"], "x.yaml: 2 problems\n  - a: bad\n  - b: worse"),
    ],
)
def test_a_config_error_lists_its_problems(problems: list[str], text: str) -> None:
    assert str(errors.ConfigError("x.yaml", problems)) == text
