"""Which tests may run side by side: files may; those that start a SLURM of their own, which knows one host, may not."""

from collections.abc import Iterator

import pytest


@pytest.hookimpl(wrapper=True)  # before xdist's own, which reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Give each file to one worker, for its fixtures; all of SLURM to one, from the start, since they wait most."""
    for item in items:
        group = "slurm" if item.get_closest_marker("slurm") else item.path.as_posix()
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: item.get_closest_marker("slurm") is None)
    yield
