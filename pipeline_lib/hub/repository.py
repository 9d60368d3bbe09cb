"""Repositories, their files, and the interface of a hub client.

The clients in `huggingface` and `modelscope` are thin layers over the hub's own package, which is
imported only when something is looked up or fetched.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from pipeline_lib.core.errors import PipelineError

Hub = Literal["huggingface", "modelscope"]
Kind = Literal["model", "dataset"]
Arrived = Callable[[int], None]  # receives the number of bytes since the last call; may be negative

_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_commit(revision: str) -> bool:
    """Return whether `revision` is a full commit ID (40 hex digits), which needs no lookup."""
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
    """A file as the hub lists it: its size in bytes and its hash.

    `algorithm` is `sha256`, or `git` for the SHA-1 of a git blob. `chunked` means that the hub also
    serves it by its own accelerated protocol.
    """

    name: str
    size: int
    algorithm: Literal["sha256", "git"]
    digest: str
    chunked: bool = False
    is_link: bool = False


class HubClient(Protocol):
    """The interface of a hub client.

    Its methods raise the package's own errors, which are among `errors`; `explain` turns them into
    errors for the user. Conditions that may pass with time are raised as Busy.
    """

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """The error types that the hub's package raises."""

    def resolve(self, repository: Repository, revision: str | None) -> str:
        """Return the current commit of `revision` (None: main branch); from the cache if there."""

    def list_files(self, repository: Repository, commit: str) -> list[RemoteFile]:
        """Return all files at `commit`, including symbolic links and submodules."""

    def download(
        self, repository: Repository, commit: str, file: RemoteFile, work: Path, arrived: Arrived
    ) -> Path:
        """Download one file, resuming if partial; return its path in the cache or below `work`."""

    def explain(self, repository: Repository, error: Exception) -> PipelineError:
        """Return the user's error: what happened and what to do, without queries or secrets.

        Secrets are tokens and passwords.
        """
