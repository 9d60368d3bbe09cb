"""Checks of untrusted names of files, before anything is written.

A name that leads out of its folder makes the whole repository unacceptable. A name that cannot be
stored (too long, or equal to another except for case) does so only if wanted.
"""

import json
import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from pipeline_lib.core.errors import DataError, IntegrityError
from pipeline_lib.core.store import MANIFEST_NAME
from pipeline_lib.core.units import count
from pipeline_lib.hub.repository import RemoteFile, Repository

_DRIVE = re.compile(r"[A-Za-z]:")
_LONGEST_BYTES = 255  # per path component
_LONGEST_PATH_BYTES = 1024  # leaves room within PATH_MAX (4096) for the path of the target folder


def check_names(
    repository: Repository, listed: Iterable[RemoteFile], wanted: Collection[RemoteFile]
) -> None:
    """Raise DataError with the name if a listed name is hostile or a wanted one unstorable."""
    for file in listed:
        if why := _leads_out(file.name):
            raise DataError(
                f"{repository}: refused, nothing was written: the file name {file.name!r} {why}"
            )
    for file in wanted:
        if why := _unusable(file):
            raise DataError(f"{repository}: refused, nothing was written: {file.name!r} {why}")
    seen: dict[str, str] = {}
    for file in wanted:
        for path in (PurePosixPath(file.name), *PurePosixPath(file.name).parents):
            known = seen.setdefault(str(path).casefold(), str(path))
            if known != str(path):
                raise DataError(
                    f"{repository}: refused, nothing was written: {known!r} and {str(path)!r} are "
                    "one file where disks ignore case"
                )


def check_index(repository: Repository, index: Path, name: str, listed: Collection[str]) -> None:
    """Check that the safetensors index at `index`, listed as `name`, names only files of `listed`.

    Raises DataError if it does not parse or names anything but a weights file beside it,
    IntegrityError if named files are missing.
    """
    try:
        content: Any = json.loads(index.read_text(encoding="utf-8"))
        shards = sorted(set(content["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{repository}: {name} is no safetensors index ({type(error).__name__}: {error})"
        ) from error
    for shard in shards:
        if (
            not isinstance(shard, str)
            or "/" in shard
            or _leads_out(shard)
            or not shard.endswith(".safetensors")
        ):
            raise DataError(
                f"{repository}: refused: {name} names {shard!r}, which is no weights file beside it"
            )
    if missing := [shard for shard in shards if shard not in listed]:
        raise IntegrityError(
            f"{repository}: {name} names {count(len(missing), 'files')} that the repository does "
            f"not have, {missing[0]!r} first; give another `revision`"
        )


def some_of(names: Sequence[str]) -> str:
    """Return the first ten of `names` and the number of the others, for messages."""
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return (", ".join(names[:10]) or "none") + more


def _leads_out(name: str) -> str | None:
    parts = name.split("/")
    if not name or name.startswith("/") or _DRIVE.match(name):
        return "is an absolute path"
    if "\\" in name:
        return "has a backslash"
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in name):
        return "has control characters"
    if ".." in parts or "." in parts or "" in parts:
        return "leads out of its folder"
    if any(part.casefold() == ".git" for part in parts):
        return "is a part of git's own folder"
    return None


def _unusable(file: RemoteFile) -> str | None:
    if file.is_link:
        return "is a symbolic link or submodule"
    if max(len(part.encode()) for part in file.name.split("/")) > _LONGEST_BYTES:
        return f"has a name of more than {_LONGEST_BYTES} bytes"
    if len(file.name.encode()) > _LONGEST_PATH_BYTES:
        return f"has a path of more than {_LONGEST_PATH_BYTES} bytes"
    if file.name.casefold() == MANIFEST_NAME:
        return "has a name that is reserved here"
    if file.size < 0 or not file.digest:
        return "has no size and hash on the hub, so it cannot be verified"
    return None
