"""A store of finished experiments to compare."""

from pathlib import Path

import pytest

from pipeline_lib.core.store import Store
from tests.compare.fakes import made


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty one."""
    return Store(tmp_path / "store")


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Three learning rates: the second within noise of the first, the third worse.

    Not to be changed.
    """
    store = Store(tmp_path_factory.mktemp("three") / "store")
    made(store, "demo-lr=0.003", 0.0, 0, train={"lr": 3e-3})
    made(store, "demo-lr=0.001", 0.004, 1, train={"lr": 1e-3})
    made(
        store,
        "demo-lr=0.01",
        0.16,
        2,
        train={"lr": 1e-2, "strategy": "fsdp"},
        cluster={"cpu_ranks": 4},
    )
    return store
