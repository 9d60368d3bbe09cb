"""What is known of a hub's repository, and what a hub's client has to do.

The clients themselves are in `huggingface` and `modelscope`; both are thin layers over the hub's own package,
which is imported only when something is looked up or fetched.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from pipeline_lib.base.errors import PipelineError

Hub = Literal["huggingface", "modelscope"]
Kind = Literal["model", "dataset"]
Arrived = Callable[[int], None]  # told the bytes that came since it was last told; may be negative

_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_commit(revision: str) -> bool:
    """Whether `revision` is a full commit id, which needs no lookup. Both hubs are git: 40 hexadecimal digits."""
    return _COMMIT.fullmatch(revision) is not None


@dataclass(frozen=True)
class Repository:
    """A repository of a hub; `name` is `owner/name`."""

    hub: Hub
    kind: Kind
    name: str

    def __str__(self) -> str:
        return f"{self.hub} {self.kind} {self.name}"


@dataclass(frozen=True)
class RemoteFile:
    """A file as the hub lists it: its size in bytes and the hash that the hub has of it.

    `algorithm` is `sha256`, or `git` for the sha1 of a git blob. `chunked`: the hub also serves it by an accelerated
    protocol of its own.
    """

    name: str
    size: int
    algorithm: Literal["sha256", "git"]
    digest: str
    chunked: bool = False
    is_link: bool = False


class HubClient(Protocol):
    """One hub. Its methods raise what its package raises, one of `errors`, and `explain` puts that into words.

    What may pass when waited for is raised as `patience.Busy`.
    """

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """What the hub's package raises."""

    def resolve(self, repository: Repository, revision: str | None) -> str:
        """The commit that `revision`, or the main branch, names now; without network if the client's cache knows."""

    def list_files(self, repository: Repository, commit: str) -> list[RemoteFile]:
        """All files at `commit`, symbolic links and submodules included as they are listed."""

    def download(self, repository: Repository, commit: str, file: RemoteFile, work: Path, arrived: Arrived) -> Path:
        """Bring one file here, resuming what is there of it; where it lies: the client's cache or below `work`."""

    def explain(self, repository: Repository, error: Exception) -> PipelineError:
        """The error for the user: what happened, and what to do; without queries, tokens and passwords."""
