"""Worlds of sealed stages to report on."""

from pathlib import Path

import pytest

from pipeline_lib.core.store import Store
from tests.report.fakes import World, realistic_files


@pytest.fixture
def world(tmp_path: Path) -> World:
    """The demo as it would be, nothing sealed yet: a test may edit `files`."""
    return World(Store(tmp_path / "store"), files=realistic_files())


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> World:
    """The demo with every stage sealed, the report by the real stage. Not to be changed."""
    world = World(Store(tmp_path_factory.mktemp("finished") / "store"), files=realistic_files())
    world.seal_inputs()
    world.seal_report()
    return world
