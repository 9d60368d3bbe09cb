"""Names come from outside: they are checked before anything is written, and so are the files that name others.

A name that leads out of its folder condemns the whole repository. What merely cannot be stored here (a name that
is too long, two that differ by case only) condemns it if the file is wanted.
"""

import json
import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from pipeline_lib.base.errors import DataError, IntegrityError
from pipeline_lib.base.manifest import MANIFEST_NAME
from pipeline_lib.hub.repository import RemoteFile, Repository

_DRIVE = re.compile(r"[A-Za-z]:")
_LONGEST_BYTES = 255  # of a component; of the whole, 4096 less what comes before it
_LONGEST_PATH_BYTES = 1024


def check_names(repository: Repository, listed: Iterable[RemoteFile], wanted: Collection[RemoteFile]) -> None:
    """Refuse a hostile or unusable name. Raises DataError that shows it."""
    for file in listed:
        if why := _leads_out(file.name):
            raise DataError(f"{repository}: refused, nothing was written: the file name {file.name!r} {why}")
    for file in wanted:
        if why := _unusable(file):
            raise DataError(f"{repository}: refused, nothing was written: {file.name!r} {why}")
    seen: dict[str, str] = {}
    for file in wanted:
        for path in (PurePosixPath(file.name), *PurePosixPath(file.name).parents):
            known = seen.setdefault(str(path).casefold(), str(path))
            if known != str(path):
                raise DataError(
                    f"{repository}: refused, nothing was written: {known!r} and {str(path)!r} are one file where disks "
                    "ignore case"
                )


def check_index(repository: Repository, index: Path, name: str, listed: Collection[str]) -> None:
    """Check that the safetensors index at `index`, listed as `name`, names only files of `listed`.

    Raises DataError for one that points out of the repository, IntegrityError for one that names missing files.
    """
    try:
        content: Any = json.loads(index.read_text(encoding="utf-8"))
        shards = sorted(set(content["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{repository}: {name} is no safetensors index ({type(error).__name__}: {error})") from error
    for shard in shards:
        if not isinstance(shard, str) or "/" in shard or _leads_out(shard) or not shard.endswith(".safetensors"):
            raise DataError(f"{repository}: refused: {name} names {shard!r}, which is no weights file beside it")
    if missing := [shard for shard in shards if shard not in listed]:
        raise IntegrityError(
            f"{repository}: {name} names {len(missing)} files that the repository does not have, {missing[0]!r} first; "
            "give another `revision`"
        )


def some_of(names: Sequence[str]) -> str:
    """The first ten of `names` and how many more there are, for messages."""
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
