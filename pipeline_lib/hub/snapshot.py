"""A repository at one commit: its files, listed and then fetched so that every byte is what the hub's hash says.

Order of things: names, disk, the small files that name others, the large ones; each is hashed, one that is
wrong is fetched once more; only then is anything put where it was asked for.
"""

import hashlib
import shutil
from collections.abc import Callable, Collection
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

from pipeline_lib.base.errors import IntegrityError
from pipeline_lib.base.fsio import disk_full_named, link_or_copy, list_files, read_json, require_space, write_json
from pipeline_lib.hub.clients import Result, ask, client_of
from pipeline_lib.hub.names import check_index, check_names
from pipeline_lib.hub.patience import in_time
from pipeline_lib.hub.repository import Arrived, RemoteFile, Repository
from pipeline_lib.hub.transfer import Tell, Transfer

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
