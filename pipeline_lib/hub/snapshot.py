"""A repository at one commit: look up the commit once, then list, fetch and verify its files."""

import hashlib
import multiprocessing
import shutil
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cached_property, partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, TypeVar

from pipeline_lib.core import arrival
from pipeline_lib.core.errors import DiskFull, HubError, IntegrityError
from pipeline_lib.core.files import (
    copy_file,
    disk_full_named,
    link_or_copy,
    list_files,
    read_json,
    require_space,
    write_json,
)
from pipeline_lib.core.store import NOTHING_VERIFIED, VerifiedFiles
from pipeline_lib.hub.names import check_index, check_names
from pipeline_lib.hub.patience import in_time, patiently
from pipeline_lib.hub.repository import Arrived, HubClient, RemoteFile, Repository, is_commit

Result = TypeVar("Result")
Say = Callable[[str], None]


def client_of(repository: Repository) -> HubClient:
    """Return the client for the hub of `repository`. Its package is imported only now."""
    if repository.hub == "huggingface":
        from pipeline_lib.hub.huggingface import HuggingFace

        return HuggingFace()
    from pipeline_lib.hub.modelscope import ModelScope

    return ModelScope()


def ask(
    client: HubClient, repository: Repository, call: Callable[[], Result], doing: str, say: Say
) -> Result:
    """Return the result of `call` of `client`; retry while the hub is busy.

    Raises HubError or DiskFull.
    """
    try:
        return patiently(call, f"{repository}: {doing}", say)
    except client.errors as error:
        raise client.explain(repository, error) from error


def resolve(repository: Repository, revision: str | None, say: Say = lambda _: None) -> str:
    """Return the current commit of `revision`, or of the main branch if None.

    Raises HubError with what to do.
    """
    if revision is not None and is_commit(revision):
        return revision
    client = client_of(repository)
    doing = "looking up its commit"
    look_up = partial(
        ask, client, repository, partial(client.resolve, repository, revision), doing, say
    )
    return in_time(look_up, f"{repository}: {doing}")


# revisions.json in the user's cache: the commit of each branch or tag when it was first looked up
# for a store. A branch that moves changes no experiment: its entry stays until the user deletes it.
# A commit as revision needs neither the file nor the network. It is no file of the store, where
# others could choose the commit.


REVISIONS_NAME = "revisions.json"


@dataclass
class Revisions:
    """The commits looked up so far, by repository and revision, in the file at `path`, if any."""

    path: Path | None
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    changed: bool = False

    @staticmethod
    def load(path: Path | None) -> "Revisions":
        """Load the file at `path`; start empty if it is missing or damaged."""
        return Revisions(path, _read(path))

    def commit_of(self, repository: Repository, revision: str | None) -> str:
        """Return the commit of `revision` (main branch if None) from the file or else the hub.

        Raises HubError.
        """
        if revision is not None and is_commit(revision):
            return revision
        key = f"{repository} {revision or 'main branch'}"
        commit = self.entries.get(key, {}).get("commit")
        if isinstance(commit, str) and is_commit(commit):
            return commit
        commit = resolve(repository, revision)
        self.entries[key] = {
            "commit": commit,
            "looked_up": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        self.changed = True
        return commit

    def save(self) -> None:
        """Write the new entries. If it cannot be written, they are looked up again next time.

        Entries that another process wrote meanwhile win: its experiment may be running already.
        """
        if not self.changed or self.path is None:
            return
        self.entries |= _read(self.path)
        try:
            write_json(self.path, self.entries)
        except (OSError, DiskFull):
            return
        self.changed = False


def _read(path: Path | None) -> dict[str, dict[str, Any]]:
    if path is None:
        return {}
    try:
        entries = dict(read_json(path))
    except (OSError, ValueError, TypeError):
        entries = {}
    return {key: entry for key, entry in entries.items() if isinstance(entry, dict)}


# Parallel transfers with two deadlines: one for inactivity, one for the whole. A client that hangs
# cannot be stopped from outside: its thread is left behind, ends at its next report of bytes, and
# does not keep the process alive.

WORKERS = 8
SILENCE_S = 600.0  # with fewer than LEAST_BYTES: a server that drips counts as silent
LEAST_BYTES = 1_000_000
SLOWEST_BYTES_PER_S = 100_000
EXTRA_S = 3600.0
_POLL_S = 0.5

Bring = Callable[[RemoteFile, Arrived], Path]
Tell = Callable[[int, int], None]  # receives the bytes that are here, and the total


class _GivenUpError(Exception):
    """Raised in a thread that was left behind, to end it."""


class Transfer:
    """A transfer of several files in parallel by calling `bring`; `doing` names it in errors."""

    def __init__(self, bring: Bring, doing: str) -> None:
        """Prepare the transfer; nothing is started."""
        self._bring = bring
        self._doing = doing
        self._lock = threading.Lock()
        self._given_up = False
        self._here_bytes = 0
        self._unsigned_bytes = 0
        self._sign_s = time.monotonic()

    def run(self, files: Sequence[RemoteFile], tell: Tell) -> dict[str, Path]:
        """Transfer `files`; return their paths by name.

        `tell` receives the bytes here and the total. Raises the first failure, or HubError when a
        deadline passes.
        """
        paths: dict[str, Path] = {}
        if not files:
            return paths
        total_bytes = sum(file.size for file in files)
        self._sign_s = time.monotonic()
        deadline_s = self._sign_s + EXTRA_S + total_bytes / SLOWEST_BYTES_PER_S
        with ThreadPool(min(WORKERS, len(files))) as pool:
            by_size = sorted(files, key=lambda file: -file.size)
            results = pool.imap_unordered(
                lambda file: (file.name, self._bring(file, self._arrived)), by_size
            )
            try:
                while len(paths) < len(files):
                    tell(min(self._here_bytes, total_bytes), total_bytes)
                    self._check(deadline_s)
                    try:
                        name, path = results.next(timeout=_POLL_S)
                    except multiprocessing.TimeoutError:
                        continue
                    paths[name] = path
                    self._sign_s = time.monotonic()
            finally:
                self._given_up = True
        return paths

    def _arrived(self, new_bytes: int) -> None:
        """Count new bytes of a file; 0 bytes is a sign of other activity, such as hashing."""
        if self._given_up:
            raise _GivenUpError
        with self._lock:
            self._here_bytes += new_bytes
            self._unsigned_bytes += max(0, new_bytes)
            if new_bytes == 0 or self._unsigned_bytes >= LEAST_BYTES:
                self._unsigned_bytes = 0
                self._sign_s = time.monotonic()

    def _check(self, deadline_s: float) -> None:
        now_s = time.monotonic()
        if now_s - self._sign_s > SILENCE_S:
            why = f"less than {LEAST_BYTES / 1e6:.1f} MB came in {SILENCE_S:.0f} s"
        elif now_s > deadline_s:
            why = f"slower than {SLOWEST_BYTES_PER_S / 1e6:.1f} MB/s for more than {EXTRA_S:.0f} s"
        else:
            return
        raise HubError(f"{self._doing}: {why}; run again, what has arrived is kept")


# Snapshots: list and fetch files so that every byte matches the hub's hash. Order: check names,
# check disk space, fetch the indexes, fetch the rest. Each file is hashed, and fetched once more if
# wrong. Only then is any file placed.

INDEX_SUFFIX = ".safetensors.index.json"
# Only weights are linked to a hub's cache or another store. Other files may be edited in place by
# people and tools, which would change the sealed content through a link.
WEIGHTS_SUFFIX = ".safetensors"
_CHUNK_BYTES = 1 << 20


class Snapshot:
    """A repository at `commit`.

    `work` is our directory for partial downloads; it survives a failure.
    """

    def __init__(
        self,
        repository: Repository,
        commit: str,
        work: Path,
        say: Callable[[str], None],
        verified: VerifiedFiles = NOTHING_VERIFIED,
    ) -> None:
        """Store the arguments and create the client. No request is made.

        Files that arrive are marked in `verified`.
        """
        self.repository = repository
        self.commit = commit
        self._work = work
        self._listing = work / "listing.json"
        self._say = say
        self._verified = verified
        self._linked: dict[Path, str] = {}  # the hashes of files that are linked to ours in `work`
        self._client = client_of(repository)

    def __str__(self) -> str:
        return f"{self.repository} at {self.commit[:12]}"

    @cached_property
    def files(self) -> dict[str, RemoteFile]:
        """All files of the commit by name, as the hub lists them. Raises HubError."""
        try:
            return {row["name"]: RemoteFile(**row) for row in read_json(self._listing)}
        except (OSError, ValueError, TypeError, KeyError):
            # Reported first: the clients retry an unreachable hub for about 20 s.
            self._say(f"{self}: listing its files")
            doing = "listing its files"
            lookup = partial(self._client.list_files, self.repository, self.commit)
            listing = partial(ask, self._client, self.repository, lookup, doing, self._say)
            return {file.name: file for file in in_time(listing, f"{self}: {doing}")}

    def check(self, names: Collection[str]) -> list[RemoteFile]:
        """Return the files `names` if they can be stored and no name is hostile.

        Raises DataError.
        """
        wanted = [self.files[name] for name in names]
        check_names(self.repository, self.files.values(), wanted)
        return wanted

    def fetch(self, names: Collection[str], out: Path, tell: Tell) -> dict[str, str]:
        """Put the files `names` into `out`, verified; `tell` receives byte counts as they arrive.

        Return the SHA-256 of each file for which the hub lists one.

        Raises DataError for unacceptable names, DiskFull before anything is fetched, HubError,
        IntegrityError.
        """
        wanted = self.check(names)
        need_bytes = sum(file.size for file in wanted)
        need_bytes -= sum((self._work / name).stat().st_size for name in list_files(self._work))
        for place in (self._work, out):
            require_space(place, need_bytes, str(self))
        indexes = [file for file in wanted if file.name.endswith(INDEX_SUFFIX)]
        paths = self._transfer(indexes, tell)
        for name, path in paths.items():
            check_index(self.repository, path, name, self.files)
        # Keep only a consistent listing for the next run: some mirrors have half of a repository.
        write_json(self._listing, [asdict(file) for file in self.files.values()])
        paths |= self._transfer([file for file in wanted if file.name not in paths], tell)
        for file in wanted:
            with disk_full_named(out / file.name):
                self._place(paths[file.name], out / file.name, file)
        return {file.name: file.digest for file in wanted if file.algorithm == "sha256"}

    def _place(self, path: Path, target: Path, file: RemoteFile) -> None:
        """Link what nobody edits, our files and a hub cache's weights, to `target`; copy others."""
        target.parent.mkdir(parents=True, exist_ok=True)
        may_link = path.is_relative_to(self._work) or path.suffix == WEIGHTS_SUFFIX
        if file.algorithm == "sha256":
            bring = arrival.link if may_link else arrival.copy
            if not bring(path, target, file.digest, self._verified):
                raise IntegrityError(f"{self}: {file.name} changed after it had arrived; run again")
            if path.is_relative_to(self._work):
                self._linked[target] = file.digest
        elif may_link:
            link_or_copy(path, target)
        else:
            copy_file(path, target)

    def close(self) -> None:
        """Delete `work`, which is kept for resuming; fetched files stay where they were put."""
        there = {target: sha256 for target, sha256 in self._linked.items() if target.exists()}
        marked = {}
        for target, sha256 in there.items():
            if self._verified.is_marked(target, sha256):
                marked[target] = target.stat()
        shutil.rmtree(self._work, ignore_errors=True)
        for target, status in marked.items():  # with one link less, the file has another ctime
            self._verified.mark_own(target, self._linked[target], status)

    def _transfer(self, files: list[RemoteFile], tell: Tell) -> dict[str, Path]:
        self._work.mkdir(parents=True, exist_ok=True)
        return Transfer(self._bring, f"{self}: fetching").run(files, tell)

    def _bring(self, file: RemoteFile, arrived: Arrived) -> Path:
        """Download and verify one file; delete one with wrong content and download it once more."""
        found = ""
        for _ in range(2):
            download = partial(
                self._client.download, self.repository, self.commit, file, self._work, arrived
            )
            path = ask(self._client, self.repository, download, f"fetching {file.name}", self._say)
            found = self._describe_once(path, file, arrived)
            if found == _described(file):
                return path
            _forget(path)
            arrived(-file.size)
            self._listing.unlink(missing_ok=True)
            self._say(f"{self}: {file.name}: wrong content ({found}), thrown away")
        raise IntegrityError(
            f"{self}: {file.name}: got {found}, the hub lists {_described(file)}; nothing of it "
            "was kept: run again, or try another mirror"
        )

    def _describe_once(self, path: Path, file: RemoteFile, arrived: Arrived) -> str:
        """Return the size and hash of the file at `path`, marked if they are those of `file`."""
        if file.algorithm != "sha256":
            return _describe(path, file.algorithm, arrived)
        is_own = path.is_relative_to(self._work)
        if not is_own and self._verified.has_sha256(
            path, file.digest, beside=path.resolve().parent
        ):
            return _described(file)
        found = _describe(path, file.algorithm, arrived)
        if is_own and found == _described(file):
            self._verified.mark_own(path, file.digest)
        return found


def is_edited_by_nobody(file: Path, store: Path) -> bool:
    """Return whether `file` is in the folder `store`, or links to a blob, as in the hub's cache."""
    found = file.resolve()
    return found.is_relative_to(store.resolve()) or (
        file.is_symlink() and found.parent.name == "blobs"
    )


def _describe(path: Path, algorithm: str, arrived: Arrived) -> str:
    """Return the size and hash of the file at `path`, in the format of `_described`."""
    size = path.stat().st_size
    if algorithm == "sha256":
        digest = hashlib.sha256()
    else:
        digest = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            arrived(0)
    return f"{size} bytes, {algorithm} {digest.hexdigest()}"


def _described(file: RemoteFile) -> str:
    return f"{file.size} bytes, {file.algorithm} {file.digest}"


def _forget(path: Path) -> None:
    """Remove a file and, if it is a link, its targets: clients' caches keep content there."""
    while path.is_symlink():
        target = path.parent / path.readlink()
        path.unlink()
        path = target
    path.unlink(missing_ok=True)
