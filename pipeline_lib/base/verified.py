"""Which files were read in full and had the right sha256, so that an unchanged one is read once on a machine.

A mark is an empty file in the user's own cache folder, never in a store, where others could forge it. Its name is a
hash of the boot of this machine, of what tells that a file was changed (device, inode, size, mtime, ctime), and of its
sha256. So processes need no lock, and a mark that is lost costs one reading.
"""

import hashlib
import os
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryFile

from pipeline_lib.base.fsio import sha256_text

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SMALL_BYTES = 1 << 20  # a smaller file is read as fast as its mark is found
SETTLED_NS = 2 * 10**9  # a younger file could change again without a change of its times
SETTLED_BY_OUR_CLOCK_NS = 3600 * 10**9  # the clock of the disk may be another machine's, and another time
MOST_MARKS = 4096


@dataclass(frozen=True)
class VerifiedFiles:
    """The marks in `folder`; without one nothing is remembered and every file is read."""

    folder: Path | None = None

    @staticmethod
    def from_env(environ: Mapping[str, str]) -> "VerifiedFiles":
        """In `$XDG_CACHE_HOME`, else in `~/.cache`."""
        home = environ.get("HOME", "")
        cache = Path(environ.get("XDG_CACHE_HOME") or (f"{home}/.cache" if home else ""))
        return VerifiedFiles(cache / "qwen3-pipeline" / "verified" if cache.is_absolute() else None)

    def has_sha256(self, path: Path, sha256: str, beside: Path) -> bool:
        """Whether the content of the file at `path` has that hash.

        `beside` is a folder on the same disk, whose clock tells the age of the file; where nothing can be written,
        this machine's has to do. Raises OSError.
        """
        with path.open("rb") as file:
            before = os.fstat(file.fileno())
            mark = self._mark(before, sha256)
            if mark is not None and _renew(mark):
                return True
            is_settled = mark is not None and _is_settled(before, beside)
            is_same = hashlib.file_digest(file, "sha256").hexdigest() == sha256
            if mark is not None and is_same and is_settled and _identity(os.fstat(file.fileno())) == _identity(before):
                _make(mark)
            return is_same

    def _mark(self, status: os.stat_result, sha256: str) -> Path | None:
        """Where the mark of such a file is, or would be; None if it is not to be remembered."""
        if self.folder is None or status.st_size < SMALL_BYTES or not self._boot_id or not self._is_private:
            return None
        return self.folder / sha256_text(f"{self._boot_id} {_identity(status)} {sha256}")

    @cached_property
    def _boot_id(self) -> str:
        """Of this machine since it was started: device numbers mean nothing on another, nor after that."""
        try:
            return BOOT_ID.read_text(encoding="ascii").strip()
        except OSError:
            return ""

    @cached_property
    def _is_private(self) -> bool:
        """Whether the folder is there, or could be made, and nobody else may write or read it."""
        if self.folder is None:
            return False
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self.folder.lstat()
        except OSError:
            return False
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


NOTHING_VERIFIED = VerifiedFiles()


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _is_settled(status: os.stat_result, beside: Path) -> bool:
    """Whether the file is old enough, by the clock of its disk, that a change from now on shows in its times."""
    changed_ns = max(status.st_mtime_ns, status.st_ctime_ns)
    try:
        with TemporaryFile(dir=beside) as probe:
            now = os.fstat(probe.fileno())
    except OSError:  # another user's store
        return time.time_ns() - changed_ns >= SETTLED_BY_OUR_CLOCK_NS
    return now.st_dev == status.st_dev and now.st_mtime_ns - changed_ns >= SETTLED_NS


def _renew(mark: Path) -> bool:
    """Whether `mark` is there; it then counts as just made."""
    try:
        os.utime(mark)
    except OSError:
        return False
    return True


def _make(mark: Path) -> None:
    """Leave `mark`; where there are too many, the older half goes."""
    with suppress(OSError):
        marks = list(mark.parent.iterdir())
        if len(marks) >= MOST_MARKS:
            marks.sort(key=lambda path: path.lstat().st_mtime_ns)
            for old in marks[: len(marks) // 2]:
                old.unlink(missing_ok=True)
        mark.touch(mode=0o600)
