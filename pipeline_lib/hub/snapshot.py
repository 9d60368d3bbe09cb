"""A repository at one commit: the commit is looked up once, its files are listed, fetched and verified."""

import hashlib
import multiprocessing
import shutil
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, TypeVar

from pipeline_lib.core.errors import DiskFull, HubError, IntegrityError
from pipeline_lib.core.files import disk_full_named, link_or_copy, list_files, read_json, require_space, write_json
from pipeline_lib.hub.repository import (
    Arrived,
    HubClient,
    RemoteFile,
    Repository,
    check_index,
    check_names,
    in_time,
    is_commit,
    patiently,
)

# The client of each hub, and calls of it that end in a result or in one clear error.

Result = TypeVar("Result")
Say = Callable[[str], None]


def client_of(repository: Repository) -> HubClient:
    """The client for the hub of `repository`. Its package is imported only now."""
    if repository.hub == "huggingface":
        from pipeline_lib.hub.huggingface import HuggingFace

        return HuggingFace()
    from pipeline_lib.hub.modelscope import ModelScope

    return ModelScope()


def ask(client: HubClient, repository: Repository, call: Callable[[], Result], doing: str, say: Say) -> Result:
    """What `call` of `client` returns, waiting for a busy hub. Raises HubError, or DiskFull."""
    try:
        return patiently(call, f"{repository}: {doing}", say)
    except client.errors as error:
        raise client.explain(repository, error) from error


def resolve(repository: Repository, revision: str | None, say: Say = lambda _: None) -> str:
    """The commit that `revision`, or the main branch, is now. Raises HubError with what to do."""
    if revision is not None and is_commit(revision):
        return revision
    client = client_of(repository)
    doing = "looking up its commit"

    def look_up() -> str:
        return ask(client, repository, lambda: client.resolve(repository, revision), doing, say)

    return in_time(look_up, f"{repository}: {doing}")


# Which commit a branch or tag was when it was first looked up: `revisions.json` in the store.
#
# A branch that moves changes no experiment: its entry stays until somebody deletes it or names another revision.
# A revision that is a commit already needs neither the file nor the network.


@dataclass
class Revisions:
    """The commits that were looked up so far, by repository and revision, remembered in the file at `path`."""

    path: Path
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    changed: bool = False

    @staticmethod
    def load(path: Path) -> "Revisions":
        """What is remembered at `path`; nothing if it is missing or damaged."""
        return Revisions(path, _read(path))

    def commit_of(self, repository: Repository, revision: str | None) -> str:
        """The commit of `revision`, or of the main branch: remembered, or asked of the hub. Raises HubError."""
        if revision is not None and is_commit(revision):
            return revision
        key = f"{repository} {revision or 'main branch'}"
        commit = self.entries.get(key, {}).get("commit")
        if isinstance(commit, str) and is_commit(commit):
            return commit
        commit = resolve(repository, revision)
        self.entries[key] = {"commit": commit, "looked_up": datetime.now(UTC).isoformat(timespec="seconds")}
        self.changed = True
        return commit

    def save(self) -> None:
        """Write what was learned. A store that cannot be written costs only the time of asking again.

        What another process learned meanwhile wins: its experiment may be running already.
        """
        if not self.changed:
            return
        self.entries |= _read(self.path)
        try:
            write_json(self.path, self.entries)
        except (OSError, DiskFull):
            return
        self.changed = False


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        entries = dict(read_json(path))
    except (OSError, ValueError, TypeError):
        entries = {}
    return {key: entry for key, entry in entries.items() if isinstance(entry, dict)}


# Files brought side by side, with two deadlines: for silence, and for the whole.
#
# A client that hangs cannot be stopped from outside: its thread is left behind, ends when it next tells of bytes,
# and does not keep the process.

WORKERS = 8
SILENCE_S = 600.0  # without LEAST_BYTES: a server that drips is as good as silent
LEAST_BYTES = 1_000_000
SLOWEST_BYTES_PER_S = 100_000
EXTRA_S = 3600.0
_POLL_S = 0.5

Bring = Callable[[RemoteFile, Arrived], Path]
Tell = Callable[[int, int], None]  # told the bytes that are here, and how many there will be


class _GivenUpError(Exception):
    """Ends a thread that was left behind."""


class Transfer:
    """Brings files by `bring`, several at a time; `doing` names the work in errors."""

    def __init__(self, bring: Bring, doing: str) -> None:
        """Nothing begins yet."""
        self._bring = bring
        self._doing = doing
        self._lock = threading.Lock()
        self._given_up = False
        self._here_bytes = 0
        self._unsigned_bytes = 0
        self._sign_s = time.monotonic()

    def run(self, files: Sequence[RemoteFile], tell: Tell) -> dict[str, Path]:
        """The paths of `files` by name. Raises what the first failure raised; HubError when a deadline passes."""
        paths: dict[str, Path] = {}
        if not files:
            return paths
        total_bytes = sum(file.size for file in files)
        self._sign_s = time.monotonic()
        deadline_s = self._sign_s + EXTRA_S + total_bytes / SLOWEST_BYTES_PER_S
        with ThreadPool(min(WORKERS, len(files))) as pool:
            results = pool.imap_unordered(self._one, sorted(files, key=lambda file: -file.size))
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

    def _one(self, file: RemoteFile) -> tuple[str, Path]:
        return file.name, self._bring(file, self._arrived)

    def _arrived(self, new_bytes: int) -> None:
        """Count bytes of a file. None at all is a sign of other work: hashing, or bytes on the wire."""
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


# A repository at one commit: its files, listed and then fetched so that every byte is what the hub's hash says.
#
# Order of things: names, disk, the small files that name others, the large ones; each is hashed, one that is
# wrong is fetched once more; only then is anything put where it was asked for.

INDEX_SUFFIX = ".safetensors.index.json"
_CHUNK_BYTES = 1 << 20


class Snapshot:
    """A repository at `commit`. `work` is a directory of ours that outlives a failure, for what arrives in parts."""

    def __init__(self, repository: Repository, commit: str, work: Path, say: Callable[[str], None]) -> None:
        """No request is made yet."""
        self.repository = repository
        self.commit = commit
        self._work = work
        self._listing = work / "listing.json"
        self._say = say
        self._client = client_of(repository)

    def __str__(self) -> str:
        return f"{self.repository} at {self.commit[:12]}"

    @cached_property
    def files(self) -> dict[str, RemoteFile]:
        """Every file of the commit by its name, as the hub lists it. Raises HubError."""
        try:
            return {row["name"]: RemoteFile(**row) for row in read_json(self._listing)}
        except (OSError, ValueError, TypeError, KeyError):
            # Said before: the clients try an unreachable hub several times, for some 20 s.
            self._say(f"{self}: listing its files")
            return {file.name: file for file in in_time(self._list, f"{self}: listing its files")}

    def _list(self) -> list[RemoteFile]:
        return self._ask(lambda: self._client.list_files(self.repository, self.commit), "listing its files")

    def check(self, names: Collection[str]) -> list[RemoteFile]:
        """The files `names`, if they and the whole repository are safe to store here. Raises DataError."""
        wanted = [self.files[name] for name in names]
        check_names(self.repository, self.files.values(), wanted)
        return wanted

    def fetch(self, names: Collection[str], out: Path, tell: Tell) -> None:
        """Put the files `names` into `out`, verified; `tell` hears of bytes as they come.

        Raises DataError for hostile names, DiskFull before anything is fetched, HubError, IntegrityError.
        """
        wanted = self.check(names)
        self._require_space(wanted, out)
        indexes = [file for file in wanted if file.name.endswith(INDEX_SUFFIX)]
        paths = self._transfer(indexes, tell)
        for name, path in paths.items():
            check_index(self.repository, path, name, self.files)
        # Only what holds together is kept for the next run: mirrors have been seen with half of a repository.
        write_json(self._listing, [asdict(file) for file in self.files.values()])
        paths |= self._transfer([file for file in wanted if file.name not in paths], tell)
        for name, path in paths.items():
            self._place(path, out / name)

    def close(self) -> None:
        """Remove what was kept for resuming; what was fetched stays where it was put."""
        shutil.rmtree(self._work, ignore_errors=True)

    def _require_space(self, wanted: list[RemoteFile], out: Path) -> None:
        """What has arrived before lies in `work` already; it is linked, or copied, to `out`."""
        here = [self._work / name for name in list_files(self._work)]
        here_bytes = sum(path.stat().st_size for path in here)
        need_bytes = sum(file.size for file in wanted) - here_bytes
        for place in (self._work, out):
            require_space(place, need_bytes, str(self))

    def _transfer(self, files: list[RemoteFile], tell: Tell) -> dict[str, Path]:
        self._work.mkdir(parents=True, exist_ok=True)
        return Transfer(self._bring, f"{self}: fetching").run(files, tell)

    def _bring(self, file: RemoteFile, arrived: Arrived) -> Path:
        """Download and verify one file; a wrong one is thrown away and fetched once more."""
        found = ""
        for _ in range(2):
            path = self._ask(
                lambda: self._client.download(self.repository, self.commit, file, self._work, arrived),
                f"fetching {file.name}",
            )
            found = _describe(path, file.algorithm, arrived)
            if found == _described(file):
                return path
            _forget(path)
            arrived(-file.size)
            self._listing.unlink(missing_ok=True)
            self._say(f"{self}: {file.name}: wrong content ({found}), thrown away")
        raise IntegrityError(
            f"{self}: {file.name}: got {found}, the hub lists {_described(file)}; nothing of it was kept: run again, "
            "or try another mirror"
        )

    def _ask(self, call: Callable[[], Result], doing: str) -> Result:
        return ask(self._client, self.repository, call, doing, self._say)

    def _place(self, path: Path, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        with disk_full_named(target):
            if path.is_relative_to(self._work):  # ours, so nobody edits it
                link_or_copy(path, target)
            else:
                link_weights_or_copy(path, target)


def link_weights_or_copy(source: Path, target: Path) -> None:
    """Make `target` the content of the user's file `source`: linked if it holds weights and the disk allows it.

    The rest is copied: people and tools edit it in place, and that would change what is sealed.
    """
    if source.suffix == ".safetensors":
        link_or_copy(source, target)
    else:
        shutil.copyfile(source, target)


def _describe(path: Path, algorithm: str, arrived: Arrived) -> str:
    """Size and hash of the file at `path`, in the same words as `_described`."""
    size = path.stat().st_size
    digest = (
        hashlib.sha256() if algorithm == "sha256" else hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    )
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            arrived(0)
    return f"{size} bytes, {algorithm} {digest.hexdigest()}"


def _described(file: RemoteFile) -> str:
    return f"{file.size} bytes, {file.algorithm} {file.digest}"


def _forget(path: Path) -> None:
    """Remove a file and, where it is a link, all it leads to: the clients' caches keep content behind links."""
    while path.is_symlink():
        target = path.parent / path.readlink()
        path.unlink()
        path = target
    path.unlink(missing_ok=True)
