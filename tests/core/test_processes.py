"""How a process imports what takes long."""

import gc

import pytest

from pipeline_lib.core.processes import importing


@pytest.fixture
def unfrozen() -> None:
    """Nothing is excluded from collections, neither before nor afterwards."""
    gc.unfreeze()


@pytest.mark.usefixtures("unfrozen")
def test_nothing_is_collected_while_modules_are_imported_and_they_are_not_looked_through_later() -> None:
    collections = []
    gc.callbacks.append(lambda phase, _: collections.append(phase))
    try:
        with importing():
            made = [[number] for number in range(100_000)]  # as many as would start a hundred collections
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
