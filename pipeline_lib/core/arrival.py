"""Brings a file whose hash is wanted into a folder to be sealed, reading it only as needed."""

import errno
import fcntl
import hashlib
from pathlib import Path
from typing import IO

from pipeline_lib.core.files import (
    COPIED_AT_ONCE,
    copy_file,
    disk_full_named,
    is_linkable,
    try_link,
)
from pipeline_lib.core.store import VerifiedFiles

_FICLONE = 0x40049409  # from linux/fs.h: share the blocks of another file
_NOT_CLONED = (
    errno.EOPNOTSUPP,
    errno.EXDEV,
    errno.EINVAL,
    errno.ENOTTY,
    errno.ENOSYS,
    errno.EPERM,
    errno.EBADF,
)


def link(source: Path, target: Path, sha256: str, verified: VerifiedFiles) -> bool:
    """Make `target` a hard link to `source`, or else a copy; return whether its hash is `sha256`.

    Nobody may edit `source` in place: the edit would change `target` too. The file is not read if
    it is marked, and stays marked. Raises OSError, DiskFull.
    """
    if not is_linkable(source, target.parent):
        return copy(source, target, sha256, verified)
    before = source.stat()
    if not verified.has_sha256(source, sha256, beside=target.parent):
        return False
    is_marked = verified.is_marked(source, sha256)
    if not try_link(source, target):
        return copy(source, target, sha256, verified)
    # The link changed the ctime. Another link, of another store, may have been made at the same
    # time.
    if is_marked and target.stat().st_nlink == before.st_nlink + 1:
        verified.mark_own(target, sha256, before)
    return verified.has_sha256(target, sha256, beside=target.parent)


def copy(source: Path, target: Path, sha256: str, verified: VerifiedFiles) -> bool:
    """Copy `source` to `target`; return whether its hash is `sha256`.

    A file system that can share blocks copies none. The content is hashed while it is copied, or
    not at all if `source` is marked before and after. Raises OSError, DiskFull.
    """
    is_same = verified.is_marked(source, sha256)
    if is_same:
        copy_file(source, target)
        is_same = verified.is_marked(source, sha256)
    if not is_same:
        is_same = _copy_hashed(source, target) == sha256
    if is_same:
        verified.mark_own(target, sha256)
    return is_same


def _copy_hashed(source: Path, target: Path) -> str:
    """Copy `source` to `target`, and return the SHA-256 of what `target` holds."""
    with disk_full_named(target), source.open("rb") as read, target.open("w+b") as written:
        if _is_cloned(read, written):
            return hashlib.file_digest(written, "sha256").hexdigest()
        digest = hashlib.sha256()
        while chunk := read.read(COPIED_AT_ONCE):
            digest.update(chunk)
            written.write(chunk)
    return digest.hexdigest()


def _is_cloned(read: IO[bytes], written: IO[bytes]) -> bool:
    """Let `written` share the blocks of `read`, and return whether their file system can."""
    try:
        fcntl.ioctl(written.fileno(), _FICLONE, read.fileno())
    except OSError as error:
        if error.errno in _NOT_CLONED:
            return False
        raise
    return True
