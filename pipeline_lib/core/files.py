"""Atomic writing and hashing of files.

Readers see a whole file or directory, or none, whichever process is killed and when. Durability is
not promised on a file system that ignores fsync.
"""

import ctypes
import errno
import hashlib
import json
import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from pipeline_lib.core.errors import DiskFull, PipelineError, Unreadable

STAGE_PREFIX = ".stage-"
TRASH_PREFIX = ".trash-"
COPIED_AT_ONCE = 1 << 24  # bytes
_SYNC_FILE_RANGE_WRITE = 2  # of Linux's fcntl.h
_C_LIBRARY = ctypes.CDLL(None)


def canonical_json(value: Any) -> str:
    """Return `value` as canonical JSON, equal for equal values: sorted keys, no spaces, no NaN."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def sha256_text(text: str) -> str:
    """Return the hexadecimal SHA-256 of `text` in UTF-8, with lone surrogates, as in JSON."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def sha256_file(path: Path) -> str:
    """Return the hexadecimal SHA-256 of the file at `path`."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_hashed(path: Path, content: Iterable[bytes | memoryview]) -> str:
    """Write `content` to the file at `path`, and return its hexadecimal SHA-256.

    The file is not yet on the disk. The disk begins to write while more of it is made: otherwise it
    would be idle until the end.
    """
    digest = hashlib.sha256()
    size = 0
    with path.open("wb") as file:
        for data in content:
            # so short that no signal has to wait long
            for start in range(0, len(data), COPIED_AT_ONCE):
                chunk = data[start : start + COPIED_AT_ONCE]
                digest.update(chunk)
                file.write(chunk)
                _start_writeback(file.fileno(), size, len(chunk))
                size += len(chunk)
    return digest.hexdigest()


def _start_writeback(descriptor: int, offset: int, size_bytes: int) -> None:
    """Let the disk begin to write part of a file, if it can; a later fsync reports failures."""
    if hasattr(_C_LIBRARY, "sync_file_range"):
        begin = ctypes.c_int64(offset)
        length = ctypes.c_int64(size_bytes)
        _C_LIBRARY.sync_file_range(descriptor, begin, length, ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))


def is_there(path: Path) -> bool:
    """Return whether `path` exists.

    Raises OSError if that cannot be determined; Path.exists may hide such an error.
    """
    return _status_of(path) is not None


def list_files(root: Path) -> list[str]:
    """Return the paths of all regular files below `root`, relative, with forward slashes, sorted.

    Raises OSError for a folder that cannot be read; Path.rglob would treat it as empty.
    """

    def raise_unless_missing(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise error

    found = []
    for folder, _, names in os.walk(root, onerror=raise_unless_missing):
        for path in (Path(folder, name) for name in names):
            if (status := _status_of(path)) is not None and stat.S_ISREG(status.st_mode):
                found.append(path.relative_to(root).as_posix())
    return sorted(found)


def _status_of(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None


def time_on_disk_ns(folder: Path) -> int:
    """Return the time by the clock that stamps files in `folder`, which may be a file server's.

    Raises OSError.
    """
    with NamedTemporaryFile(prefix=STAGE_PREFIX, dir=folder) as probe:
        os.utime(probe.name)
        return Path(probe.name).stat().st_mtime_ns


def take_out_of_future(paths: Iterable[Path]) -> None:
    """Set the time of each of `paths` that lies in the future to now, by the clock of its disk.

    Snakemake sets the times of a job's outputs to now, and refuses outputs that are older than the
    inputs: as behind a machine whose clock is ahead, or in a store that was copied from one. A file
    that only another user may write stays as it is; in a folder where only another user may write,
    this machine's clock counts.
    """
    now_ns: dict[Path, int] = {}
    for path in paths:
        status = _status_of(path)
        if status is None:
            continue
        if path.parent not in now_ns:
            now_ns[path.parent] = time.time_ns()
            with suppress(OSError):
                now_ns[path.parent] = time_on_disk_ns(path.parent)
        if status.st_mtime_ns > now_ns[path.parent]:
            with suppress(OSError):
                os.utime(path)


def fsync_path(path: Path) -> None:
    """Flush the file or directory at `path` to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Replace the file at `path` with `text` atomically; create its parent directory."""
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
    """Replace the file at `path` with `value` as indented JSON, atomically."""
    write_text(path, json_text(value))


def json_text(value: Any) -> str:
    """Return the text that `write_json` writes for `value`; parsing and rendering keep it."""
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def read_json(path: Path) -> Any:
    """Return the JSON value in the file at `path`. Raises OSError or ValueError."""
    return json.loads(path.read_text(encoding="utf-8"))


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    """Replace the file at `path` with `rows`, one JSON object per line, atomically."""
    lines = (json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows)
    write_text(path, "".join(line + "\n" for line in lines))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects in the file at `path`, one per line. Raises OSError or ValueError."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


def stage_dir(final: Path) -> Path:
    """Create an empty directory beside `final`, on its disk, to fill and publish as `final`."""
    final.parent.mkdir(parents=True, exist_ok=True)
    staged = final.parent / f"{STAGE_PREFIX}{final.name}-{uuid.uuid4().hex[:12]}"
    staged.mkdir()
    return staged


def sweep(folder: Path, name: str) -> None:
    """Remove what killed writers of `folder`/`name`* left behind.

    The caller holds the lock for them.
    """
    for prefix in (STAGE_PREFIX, TRASH_PREFIX):
        for debris in folder.glob(f"{prefix}{name}*"):
            if debris.is_dir():
                shutil.rmtree(debris, ignore_errors=True)
            else:
                debris.unlink(missing_ok=True)


def publish_dir(staged: Path, final: Path, require: Callable[[], None] = lambda: None) -> bool:
    """Rename the sealed directory `staged` to `final`; return False if `final` already had content.

    What is in it gets the mode that the umask gave to `staged`, so that who may read one file may
    read all: libraries write some files for their owner alone. A caller that gets False has to
    verify the existing directory. `require` is called right before the rename; an exception from it
    prevents the rename.
    """
    mode = stat.S_IMODE(staged.stat().st_mode)
    for path in sorted(staged.rglob("*"), reverse=True):
        _set_mode(path, mode)
        fsync_path(path)
    fsync_path(staged)
    require()
    try:
        staged.rename(final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    fsync_path(final.parent)
    return True


def _set_mode(path: Path, of_folder: int) -> None:
    """Give a folder the mode `of_folder`, and a file the same without execution.

    The modes of hard links are those of the files elsewhere, and stay. So do all where the file
    system has none.
    """
    status = path.lstat()
    if stat.S_ISDIR(status.st_mode):
        wanted = of_folder
    elif stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
        wanted = of_folder & 0o666
    else:
        return
    if stat.S_IMODE(status.st_mode) != wanted:
        with suppress(PermissionError):
            path.chmod(wanted)


def remove_dir(path: Path) -> None:
    """Delete the directory at `path`, renamed first: the name is free even if deletion fails."""
    if not path.exists():
        return
    trash = path.parent / f"{TRASH_PREFIX}{path.name}-{uuid.uuid4().hex[:12]}"
    path.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def link_or_copy(source: Path, target: Path) -> None:
    """Give `target` the content of the file `source`: a hard link if linkable, else a copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if not try_link(source, target):
        copy_file(source, target)


def try_link(source: Path, target: Path) -> bool:
    """Make `target` a hard link to the file `source` if linkable; return whether it is one."""
    if not is_linkable(source, target.parent):
        return False
    try:
        os.link(source.resolve(), target)
    except OSError:
        return False
    return True


def is_linkable(source: Path, folder: Path) -> bool:
    """Return whether `folder` may link to the file `source`: on one disk, with the same readers.

    The link is a hard link. A link has the mode of its file, which may let fewer people read it
    than the folder does.
    """
    found = source.stat()
    place = folder.stat()
    readers = stat.S_IMODE(place.st_mode) & 0o444
    return found.st_dev == place.st_dev and found.st_mode & readers == readers


def copy_file(source: Path, target: Path) -> None:
    """Copy the content of a file; a file system that can share blocks (Btrfs, XFS) copies none.

    Raises DiskFull.
    """
    with disk_full_named(target), source.open("rb") as read, target.open("wb") as written:
        try:
            while os.copy_file_range(read.fileno(), written.fileno(), COPIED_AT_ONCE):
                continue
        except OSError as error:
            if is_disk_full(error):
                raise
            read.seek(0)
            written.truncate(0)
            written.seek(0)
            shutil.copyfileobj(read, written, COPIED_AT_ONCE)


def replace_link(link: Path, target: Path) -> None:
    """Make `link` a relative symbolic link to `target` atomically; replace an existing link."""
    link.parent.mkdir(parents=True, exist_ok=True)
    partial = link.with_name(f"{STAGE_PREFIX}{link.name}-{uuid.uuid4().hex[:12]}")
    partial.symlink_to(os.path.relpath(target.resolve(), link.parent.resolve()))
    partial.replace(link)


def nearest_existing(path: Path) -> Path:
    """Return `path`, or the nearest path above it that exists."""
    return next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())


def unwritable(folder: Path) -> str | None:
    """Return why nothing can be written in `folder`, which may not exist; None if it can be."""
    nearest = nearest_existing(folder)
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return None
    return f"{nearest} {'cannot be written' if nearest.is_dir() else 'is no folder'}"


def require_space(where: Path, need_bytes: int, purpose: str) -> None:
    """Raise DiskFull unless the disk of `where` has `need_bytes` free for `purpose`."""
    free_bytes = _free_bytes(where)
    if free_bytes < need_bytes:
        raise DiskFull(
            f"{where}: {purpose} needs {need_bytes / 1e6:,.1f} MB, and {free_bytes / 1e6:,.1f} MB "
            "are free; free some space or point PIPELINE_STORE at a larger disk"
        )


def _free_bytes(where: Path) -> int:
    return shutil.disk_usage(nearest_existing(where)).free


def disk_full(where: Path | str) -> DiskFull:
    """Return the error for a write to `where` that found the disk full."""
    return DiskFull(
        f"{where}: the disk is full; what was begun is removed. Free some space and run snakemake "
        "again"
    )


@contextmanager
def unreadable_named(where: Path) -> Iterator[None]:
    """Turn an OSError of a read into an Unreadable that names the file.

    Errors for a missing file, or for a folder in its place, pass through unchanged.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise
    except OSError as error:
        raise Unreadable(
            f"{error.filename or where}: cannot be read ({error.strerror or error}), so it is not "
            "known whether it is "
            "whole; nothing was changed. Remove the cause and run the same command again"
        ) from error


_FULL = (errno.ENOSPC, errno.EDQUOT)


def is_disk_full(error: BaseException) -> bool:
    """Return whether `error` means that a disk, or a user's quota on it, is full.

    Libraries in Rust and C++ say so only in the text of another error (tokenizers of a plain
    Exception).
    """
    if isinstance(error, OSError):
        return error.errno in _FULL
    return not isinstance(error, PipelineError) and any(
        os.strerror(code) in str(error) for code in _FULL
    )


def disk_full_named(where: Path | str) -> AbstractContextManager[None]:
    """Return a context that turns an error for a full disk or quota into DiskFull at `where`."""
    return _DiskFullNamed(where)


@dataclass(frozen=True)
class _DiskFullNamed(AbstractContextManager[None]):
    where: Path | str

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        """Raise DiskFull in the place of the error."""
        if error is not None and is_disk_full(error):
            where = error.filename if isinstance(error, OSError) and error.filename else self.where
            raise disk_full(where) from error
