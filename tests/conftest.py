"""Which tests run side by side: files do, but not those in tests/slurm, whose clusters share the host's addresses.

Those in tests/gpu do one by one, since GPUs are lent for minutes.
"""

from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

SLURM, GPU = "tests/slurm/", "tests/gpu/"
LONG = (SLURM, "tests/pipeline/", "tests/train/")  # these begin first, so that none is left alone at the end


class ByFile(LoadFileScheduling):  # type: ignore[misc]
    """Gives each file to one worker, for its fixtures, and all of SLURM to one."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(GPU):
            return nodeid
        return SLURM if nodeid.startswith(SLURM) else str(super()._split_scope(nodeid))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    """Called where there are several workers."""
    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the long ones to the front."""
    items.sort(key=lambda item: next((LONG.index(part) for part in LONG if item.nodeid.startswith(part)), len(LONG)))
