"""How a process imports what takes long, and without what it does not need."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline_lib.core.processes import importing


@pytest.fixture
def unfrozen() -> None:
    """Nothing is excluded from collections, neither before nor afterwards."""
    gc.unfreeze()


@pytest.mark.usefixtures("unfrozen")
def test_nothing_is_collected_while_modules_are_imported_and_they_are_not_looked_through_later() -> (
    None
):
    collections = []
    gc.callbacks.append(lambda phase, _: collections.append(phase))
    try:
        with importing():
            # as many as would start a hundred collections
            made = [[number] for number in range(100_000)]
            assert collections == []
        assert gc.get_freeze_count() > len(made)
        assert gc.isenabled()
    finally:
        gc.callbacks.pop()
        gc.unfreeze()


def test_a_failed_import_leaves_the_collector_enabled() -> None:
    with pytest.raises(ImportError), importing():
        raise ImportError("no such module")
    assert gc.isenabled()
    gc.unfreeze()


IMPORT = """
import sys
from pipeline_lib.core.processes import importing
with importing():
    import pipeline_lib.train.rank, pipeline_lib.model.lora
    import needy
print("sklearn" in sys.modules, "boto3" in sys.modules, needy.scipy.VALUE)
"""


def test_what_is_not_needed_is_not_imported_and_what_needs_it_finds_it(tmp_path: Path) -> None:
    """scikit-learn imports scipy, and transformers scikit-learn if present: many have both."""
    for name, text in {
        "scipy": "VALUE = 3",
        "sklearn": "import scipy",
        "boto3": "raise SystemExit('nobody needs it')",
        "needy": "import scipy",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
        metadata = tmp_path / f"{name}-9.0.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.0\n")
    path = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}", "PATH": "/usr/bin"}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], env=path, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["False False 3"], done.stderr
