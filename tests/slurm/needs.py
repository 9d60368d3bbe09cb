"""Marks for tests that start a cluster of their own."""

import os

import pytest

from tests.slurm.loopback import missing
from tests.slurm.settings import Settings

__all__ = ["needs_accounting", "needs_namespaces", "needs_slurm"]


def _needs(settings: Settings) -> pytest.MarkDecorator:
    lacking = missing(settings)
    reason = f"needs {', '.join(lacking)} ({', '.join(sorted(set(lacking.values())))})"
    if not lacking:
        reason = "needs to be root, as slurmd does"
    return pytest.mark.skipif(bool(lacking) or os.geteuid() != 0, reason=reason)


needs_slurm = _needs(Settings())
needs_namespaces = _needs(Settings(namespaces=True))
needs_accounting = _needs(Settings(accounting=True))
