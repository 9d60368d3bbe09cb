"""Files that are whole and cannot be read, as a real system makes them."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NOBODY = 65534


@contextmanager
def no_permission(path: Path) -> Iterator[None]:
    """EACCES: a file of mode 000, for somebody who is not root."""
    mode = path.stat().st_mode
    parents = [one for one in path.parents if one.stat().st_uid == os.getuid()]
    modes = [one.stat().st_mode for one in parents]
    for one, its in zip(parents, modes, strict=True):
        one.chmod(its | 0o055)
    path.chmod(0)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        path.chmod(mode)
        for one, its in zip(parents, modes, strict=True):
            one.chmod(its)


@contextmanager
def endless_link(path: Path) -> Iterator[None]:
    """ELOOP: a symbolic link to itself."""
    aside = path.with_name(f"{path.name}.aside")
    path.rename(aside)
    path.symlink_to(path)
    try:
        yield
    finally:
        path.unlink()
        aside.rename(path)


@contextmanager
def too_many_open_files(_: Path) -> Iterator[None]:
    """EMFILE: the process may open no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


each_way = pytest.mark.parametrize("unreadable", [no_permission, endless_link, too_many_open_files])
