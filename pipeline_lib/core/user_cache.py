"""The user's own folder for what was computed about files: only the user can write there.

So what is in it can be believed. What lies in a store, anyone may have written who shares it.
"""

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True)
class UserCache:
    """The cache in `folder`. Without a folder, or in one that others may enter, nothing is kept."""

    folder: Path | None = None

    @staticmethod
    def from_env(environ: Mapping[str, str]) -> "UserCache":
        """Return the cache in `$XDG_CACHE_HOME`, else `~/.cache`; without absolute path, none."""
        home = environ.get("HOME", "")
        cache = Path(environ.get("XDG_CACHE_HOME") or (f"{home}/.cache" if home else ""))
        return UserCache(cache / "qwen3-pipeline" if cache.is_absolute() else None)

    def within(self, *names: str) -> "UserCache":
        """Return the cache in a folder of this one."""
        return UserCache(self.folder.joinpath(*names) if self.folder is not None else None)

    def file(self, name: str) -> Path | None:
        """Return the path of a file to read and write; None if nothing is kept."""
        return self.folder / name if self.folder is not None and self.is_private else None

    @cached_property
    def is_private(self) -> bool:
        """Whether the folder exists or can be created, and nobody else may read or write it."""
        if self.folder is None:
            return False
        try:
            for level in reversed((self.folder, *self.folder.parents)):
                level.mkdir(mode=0o700, exist_ok=True)
            return _is_kept_from_others(self.folder.lstat(), forbidden=0o077)
        except OSError:
            return False


NOTHING_KEPT = UserCache()


def is_own(folder: str) -> bool:
    """Return whether `folder` is absolute, exists or can be made, and is only this user's.

    Only this user may write there.
    """
    path = Path(folder)
    if not path.is_absolute():
        return False
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _is_kept_from_others(path.stat(), forbidden=0o022)
    except OSError:
        return False


def _is_kept_from_others(status: os.stat_result, forbidden: int) -> bool:
    """Return whether it is a folder of this user whose mode has none of the bits `forbidden`."""
    is_own_folder = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return is_own_folder and not status.st_mode & forbidden
