"""The client for ModelScope, based on `modelscope_hub`, the light client inside `modelscope`.

`modelscope` itself takes two seconds to import and loads torch; its functions hand over to this
client, but pass on neither the expected hash nor progress. Of this client, the public
`list_repo_files` and `download_file` lack the commits and the progress too, hence `legacy` and
`downloader`.

The package's MODELSCOPE_* variables configure it. The hub serves any full commit, but does not name
the commit of a branch. It names, for each file, the last commit that changed it. The newest of
these is used as the branch's commit if it lists the same files and hashes. It does not if the last
commit only removed files; then `revision` must be a commit. There is no offline mode: content that
was listed and fetched before needs no network. Tied to modelscope_hub 0.5: only its `legacy`
interface lists files with their commits, and only a name inside `_download` can disable its bars.
"""

import logging
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import requests
from modelscope_hub import HubApi, ProgressCallback, _download
from modelscope_hub.config import HubConfig
from modelscope_hub.errors import APIError, CacheNotFound, FileIntegrityError, RequestTimeoutError
from modelscope_hub.errors import HubError as ClientError
from tqdm import tqdm  # type: ignore[import-untyped]

from pipeline_lib.core.errors import HubError, IntegrityError, PipelineError
from pipeline_lib.core.files import sha256_file
from pipeline_lib.hub.patience import BUSY_STATUSES, Busy
from pipeline_lib.hub.refusals import (
    Credentials,
    answers_read,
    broken,
    plain,
    refuse_impossible_token,
    refused,
)
from pipeline_lib.hub.repository import Arrived, RemoteFile, Repository, is_commit

logging.getLogger("modelscope_hub").setLevel(logging.ERROR)  # else it tells each retry

MAIN_BRANCH = "master"
# symbolic link and submodule, in octal and in decimal
_LINK_MODES = ("120000", "160000", "40960", "57344")


class ModelScope:
    """The HubClient for ModelScope."""

    errors: tuple[type[Exception], ...] = (ClientError, requests.RequestException, OSError)

    def __init__(self) -> None:
        """Read the environment; no request is made. Raises HubError for a token that none is."""
        # The client would draw progress bars into job logs and has no option to disable them.
        _download.tqdm = partial(tqdm, disable=True)  # type: ignore[attr-defined]
        self._config = HubConfig()
        refuse_impossible_token(self.credentials)
        self._api = HubApi(self._config)

    @property
    def credentials(self) -> Credentials:
        """The token in use."""
        return Credentials("MODELSCOPE_API_TOKEN", self._config.token)

    def resolve(self, repository: Repository, revision: str | None) -> str:
        """Return the commit of a branch or tag: its files' newest one, if it has the same content.

        Raises HubError if it has not.
        """
        branch = revision or MAIN_BRANCH
        entries = self._entries(repository, branch)
        with answers_read(repository, self.errors):
            newest = max(
                entries, key=lambda entry: int(entry.get("CommittedDate") or 0), default={}
            )
        commit = str(newest.get("Revision") or "")
        if is_commit(commit) and _content(self._entries(repository, commit)) == _content(entries):
            return commit
        raise HubError(
            f"{repository}: the hub names no commit for {branch!r}; give `revision` a commit of 40 "
            "digits"
        )

    def list_files(self, repository: Repository, commit: str) -> list[RemoteFile]:
        """Return the files at `commit`, each with the hub's SHA-256."""
        with answers_read(repository, self.errors):
            return [_remote_file(entry) for entry in self._entries(repository, commit)]

    def _entries(self, repository: Repository, revision: str) -> list[dict[str, Any]]:
        try:
            with answers_read(repository, self.errors):
                entries = self._api.legacy.list_repo_files(
                    repository.name, repository.kind, revision
                )
                return [entry for entry in entries if entry.get("Type") != "tree"]
        except ClientError as error:
            raise _busy_or(error) from error

    def download(
        self, repository: Repository, commit: str, file: RemoteFile, work: Path, arrived: Arrived
    ) -> Path:
        """Return the file's path, in the user's cache or below `work`; download it if necessary.

        The client keeps its partial files below `work` too.
        """

        class Told(ProgressCallback):
            def update(self, size: int) -> None:
                arrived(size)

        with suppress(CacheNotFound):
            cached: Path = self._api.downloader.download_file(
                repository.name, repository.kind, file.name, revision=commit, local_files_only=True
            )
            # Caches of old versions do not record commits.
            if cached.stat().st_size == file.size and sha256_file(cached) == file.digest:
                arrived(file.size)
                return cached
        try:
            with answers_read(repository, self.errors):
                return self._api.downloader.download_file(
                    repository.name,
                    repository.kind,
                    file.name,
                    revision=commit,
                    local_dir=work,
                    expected_sha256=file.digest,
                    file_size=file.size,
                    progress_callbacks=[Told],
                )
        except FileIntegrityError as error:
            reason = plain(error.message, self._config.token)
            raise IntegrityError(
                f"{repository} at {commit[:12]}: {file.name}: {reason}; the hub lists {file.size} "
                "bytes, "
                f"sha256 {file.digest}; nothing of it was kept: run again, or try another mirror"
            ) from error
        except ClientError as error:
            raise _busy_or(error) from error

    def explain(self, repository: Repository, error: Exception) -> PipelineError:
        """Return the error to show the user for `error`."""
        page = f"{self._config.endpoint}/{repository.kind}s/{repository.name}"
        credentials = self.credentials
        if isinstance(error, APIError) and error.status_code in (401, 403, 404):
            hint = "gated" if error.status_code == 403 else ""
            return refused(repository, error.status_code, page, credentials, hint)
        return broken(repository, error, credentials)


def _busy_or(error: ClientError) -> Exception:
    """Return Busy for an error that deserves a retry although the client gave up, else `error`.

    The client's waits are short, and it limits the time for one file.
    """
    wait_s = getattr(error, "retry_after", None)
    if isinstance(error, APIError) and error.status_code in BUSY_STATUSES and wait_s is not None:
        return Busy(f"the hub answers HTTP {error.status_code}", float(wait_s))
    if isinstance(error, RequestTimeoutError) and not error.retryable:
        return Busy(
            "the client's time for one file is over (MODELSCOPE_DOWNLOAD_TOTAL_TIMEOUT)", 0.0
        )
    return error


def _content(entries: list[dict[str, Any]]) -> set[tuple[Any, Any, Any]]:
    return {(entry.get("Path"), entry.get("Size"), entry.get("Sha256")) for entry in entries}


def _remote_file(entry: dict[str, Any]) -> RemoteFile:
    name = entry["Path"]
    size = int(entry["Size"])
    digest = str(entry.get("Sha256") or "")
    return RemoteFile(
        name, size, "sha256", digest.lower(), is_link=str(entry.get("Mode")) in _LINK_MODES
    )
