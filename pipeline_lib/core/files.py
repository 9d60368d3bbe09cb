"""Atomic writing and hashing of files.

Promise: a reader sees a whole file or directory, or none, whatever is killed and when. Not promised:
durability on a file system that lies about fsync.
"""

import errno
import hashlib
import json
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline_lib.core.errors import DiskFull, Unreadable

STAGE_PREFIX = ".stage-"
TRASH_PREFIX = ".trash-"
_CHUNK_BYTES = 1 << 20


def canonical_json(value: Any) -> str:
    """`value` as the one JSON text that equal values share: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def sha256_text(text: str) -> str:
    """The hexadecimal sha256 of `text` in UTF-8, also of half a character, which JSON can hold."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def sha256_file(path: Path) -> str:
    """The hexadecimal sha256 of the bytes of the file at `path`."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def is_there(path: Path) -> bool:
    """Whether there is something at `path`. Raises OSError where that cannot be seen, which Path.exists may hide."""
    return _status_of(path) is not None


def list_files(root: Path) -> list[str]:
    """Paths of all files below `root`, relative and with forward slashes, sorted.

    Raises OSError for a folder that cannot be read, where Path.rglob would find it empty.
    """
    found = []
    for folder, _, names in os.walk(root, onerror=_raise_unless_missing):
        for path in (Path(folder, name) for name in names):
            if (status := _status_of(path)) is not None and stat.S_ISREG(status.st_mode):
                found.append(path.relative_to(root).as_posix())
    return sorted(found)


def _status_of(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def fsync_path(path: Path) -> None:
    """Ask the system to put the file or directory at `path` on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Replace the file at `path` by `text` atomically; its parent directory is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{STAGE_PREFIX}{path.name}-{uuid.uuid4().hex[:12]}")
    try:
        with disk_full_named(path), partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    fsync_path(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Replace the file at `path` by `value` as indented JSON, atomically."""
    write_text(path, json_text(value))


def json_text(value: Any) -> str:
    """What `write_json` writes of `value`: read and written again it is the same text."""
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def read_json(path: Path) -> Any:
    """The JSON value in the file at `path`. Raises OSError or ValueError."""
    return json.loads(path.read_text(encoding="utf-8"))


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    """Replace the file at `path` by one JSON object a line, atomically."""
    lines = (json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows)
    write_text(path, "".join(line + "\n" for line in lines))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The JSON objects in the file at `path`, one a line. Raises OSError or ValueError."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


def stage_dir(final: Path) -> Path:
    """A new empty directory beside `final`, on the same disk, to be filled and then published there."""
    final.parent.mkdir(parents=True, exist_ok=True)
    staged = final.parent / f"{STAGE_PREFIX}{final.name}-{uuid.uuid4().hex[:12]}"
    staged.mkdir()
    return staged


def sweep(folder: Path, name: str) -> None:
    """Remove what killed writers of `folder`/`name`* left behind. The caller holds the lock on them."""
    for prefix in (STAGE_PREFIX, TRASH_PREFIX):
        for debris in folder.glob(f"{prefix}{name}*"):
            if debris.is_dir():
                shutil.rmtree(debris, ignore_errors=True)
            else:
                debris.unlink(missing_ok=True)


def fsync_tree(root: Path) -> None:
    """Put every file below `root`, and every directory, on disk."""
    for path in sorted(root.rglob("*"), reverse=True):
        fsync_path(path)
    fsync_path(root)


def publish_dir(staged: Path, final: Path, require: Callable[[], None] = lambda: None) -> bool:
    """Rename the sealed directory `staged` onto `final`. False if `final` already had content.

    The loser of a race learns it from the return value and has to verify the winner. `require` is called right before
    the rename, and prevents it by what it raises.
    """
    fsync_tree(staged)
    require()
    try:
        staged.rename(final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    fsync_path(final.parent)
    return True


def remove_dir(path: Path) -> None:
    """Delete the directory at `path`; it vanishes from its name at once, whatever happens later."""
    if not path.exists():
        return
    trash = path.parent / f"{TRASH_PREFIX}{path.name}-{uuid.uuid4().hex[:12]}"
    path.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def link_or_copy(source: Path, target: Path) -> None:
    """Make `target` the content of the file `source`: a hard link where the disk allows it, else a copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source.resolve(), target)
    except OSError:
        with disk_full_named(target):
            shutil.copyfile(source, target)


def replace_link(link: Path, target: Path) -> None:
    """Make `link` a relative symbolic link to `target` in one step, replacing one that is there."""
    link.parent.mkdir(parents=True, exist_ok=True)
    partial = link.with_name(f"{STAGE_PREFIX}{link.name}-{uuid.uuid4().hex[:12]}")
    partial.symlink_to(os.path.relpath(target.resolve(), link.parent.resolve()))
    partial.replace(link)


def unwritable(folder: Path) -> str | None:
    """Why nothing can be written in `folder`, which may not be there yet; None if it can."""
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return None
    return f"{nearest} {'cannot be written' if nearest.is_dir() else 'is no folder'}"


def require_space(where: Path, need_bytes: int, purpose: str) -> None:
    """Raise DiskFull unless the disk of `where` has `need_bytes` free for `purpose`."""
    if _free_bytes(where) < need_bytes:
        raise DiskFull(
            f"{where}: {purpose} needs {need_bytes / 1e6:,.1f} MB, and {_free_bytes(where) / 1e6:,.1f} MB are free; "
            "free some space or point PIPELINE_STORE at a larger disk"
        )


def disk_full(where: Path) -> DiskFull:
    """The error for a write to `where` that met a full disk."""
    return DiskFull(f"{where}: the disk is full; what was begun is removed. Free some space and run snakemake again")


def _free_bytes(where: Path) -> int:
    while not where.exists():
        where = where.parent
    return shutil.disk_usage(where).free


@contextmanager
def unreadable_named(where: Path) -> Iterator[None]:
    """Turn the system's refusal to read into an Unreadable that names the file.

    That there is no such file, or a folder in its place, stays the OSError that it is.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise
    except OSError as error:
        raise Unreadable(
            f"{error.filename or where}: cannot be read ({error.strerror or error}), so it is not known whether it is "
            "whole; nothing was changed. Remove the cause and run the same command again"
        ) from error


def is_disk_full(error: BaseException) -> bool:
    """Whether `error` is the system's word that a disk, or a user's quota on it, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def disk_full_named(where: Path) -> Iterator[None]:
    """Turn the system's "no space left" into a DiskFull that names `where`."""
    try:
        yield
    except OSError as error:
        if not is_disk_full(error):
            raise
        raise disk_full(where) from error
