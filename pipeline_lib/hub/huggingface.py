"""The client for Hugging Face or a mirror of it, based on `huggingface_hub`.

The package's own variables set the mirror, token, cache and offline mode. Files in the user's cache
are used from there. Chunked (Xet) files are downloaded into that cache by the accelerated client.
Other files are downloaded by plain HTTP into our working directory: since version 2 the cache keeps
no partial files, so only there can a killed download resume. Tied to huggingface_hub 2.4:
`_tree_cache` (listings that `hf download` caches) and `_runtime` (Xet detection) are private, and
plain downloads (`file_download`) have no stable interface.
"""

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import (
    HfApi,
    constants,
    get_session,
    get_token,
    hf_hub_download,
    hf_hub_url,
    set_client_factory,
    try_to_load_from_cache,
)
from huggingface_hub._tree_cache import read_tree_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
    XetDownloadError,
)
from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers, parse_ratelimit_headers  # type: ignore[attr-defined]  # lazy
from huggingface_hub.utils._runtime import is_xet_available

from pipeline_lib.core.errors import HubError, HubOutOfReach, PipelineError
from pipeline_lib.hub.patience import BUSY_STATUSES, Busy, retry_after_s
from pipeline_lib.hub.refusals import (
    Credentials,
    answers_read,
    broken,
    not_set_up,
    plain,
    refuse_impossible_token,
    refused,
)
from pipeline_lib.hub.repository import Arrived, RemoteFile, Repository

# The first matching type decides; without a token the hub answers 401 for a missing repository.
_HINTS: dict[type[Exception], str] = {
    GatedRepoError: "gated",
    RepositoryNotFoundError: "repository",
    RevisionNotFoundError: "revision",
    EntryNotFoundError: "file",
}


class HuggingFace:
    """The HubClient for Hugging Face.

    It sets timeouts, and leaves retries of a busy hub to `patiently`.
    """

    errors: tuple[type[Exception], ...] = (
        httpx2.HTTPError,
        httpx2.InvalidURL,
        OSError,
        EntryNotFoundError,
        RevisionResolutionError,
        XetDownloadError,
    )

    def __init__(self) -> None:
        """Install a client with timeouts for this process. No request is made.

        Raises HubError if the environment (proxies, certificates, tokens) would let it make none.
        """
        refuse_impossible_token(self.credentials)
        try:
            hooks = get_session().event_hooks["request"]
        except (httpx2.InvalidURL, ImportError, OSError, ValueError) as error:
            raise not_set_up("huggingface", error) from error
        inherited = [hook for hook in hooks if hook is not _limit_waits]
        set_client_factory(partial(_client_with_timeouts, inherited))
        self._api = HfApi()

    @property
    def credentials(self) -> Credentials:
        """The token in use, which the package also finds where `hf auth login` has put it."""
        return Credentials("HF_TOKEN", get_token())

    def resolve(self, repository: Repository, revision: str | None) -> str:
        """Return the commit of a branch or tag; offline, the one that the cache's `refs` hold."""
        if constants.is_offline_mode():
            kept = self._api.resolve_revision(
                repository.name, repo_type=repository.kind, revision=revision, local_files_only=True
            )
            return kept.resolved
        timeout_s = constants.HF_HUB_ETAG_TIMEOUT
        with answers_read(repository, self.errors):
            info = self._api.repo_info(
                repository.name, repo_type=repository.kind, revision=revision, timeout=timeout_s
            )
        if not info.sha:
            raise HubError(f"{repository}: the hub names no commit; give `revision` a commit")
        return info.sha

    def list_files(self, repository: Repository, commit: str) -> list[RemoteFile]:
        """Return the files at `commit`; offline, from the listing in the cache of `hf download`."""
        if constants.is_offline_mode():
            folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(
                repo_id=repository.name, repo_type=repository.kind
            )
            tree = read_tree_cache(str(folder), commit)
            if tree is None:
                raise HubError(
                    f"{repository}: offline, and the cache {constants.HF_HUB_CACHE} has no listing "
                    f"of commit {commit}; unset HF_HUB_OFFLINE, or run `hf download "
                    f"{repository.name} --revision {commit}` where there is a network and share "
                    "its cache"
                )
            return [
                _remote_file(name, entry.size, entry.blob_id, entry.lfs_sha256, entry.xet_hash)
                for name, entry in tree.items()
            ]
        with answers_read(repository, self.errors):
            entries = self._api.list_repo_tree(
                repository.name, repo_type=repository.kind, revision=commit, recursive=True
            )
            files = [entry for entry in entries if isinstance(entry, RepoFile)]
        found = []
        for file in files:
            sha256 = file.lfs.sha256 if file.lfs else None
            found.append(_remote_file(file.path, file.size, file.blob_id, sha256, file.xet_hash))
        return found

    def download(
        self, repository: Repository, commit: str, file: RemoteFile, work: Path, arrived: Arrived
    ) -> Path:
        """Return the file's path, in the user's cache or below `work`; download it if necessary."""
        name = repository.name
        kind = repository.kind
        cached = try_to_load_from_cache(name, file.name, repo_type=kind, revision=commit)
        if isinstance(cached, str):
            arrived(file.size)
            return Path(cached)
        if constants.is_offline_mode():
            raise HubError(
                f"{repository}: offline, and {file.name} is not in the cache "
                f"{constants.HF_HUB_CACHE}; unset "
                "HF_HUB_OFFLINE, or fetch it with `hf download` where there is a network"
            )
        bar = bar_telling(arrived)
        if file.chunked and is_xet_available():
            with answers_read(repository, self.errors):
                try:
                    return Path(
                        hf_hub_download(
                            name, file.name, repo_type=kind, revision=commit, tqdm_class=bar
                        )
                    )
                except RuntimeError as error:  # the accelerated client raises it for every failure
                    raise XetDownloadError(str(error)) from error
        # Two files with the same content may be downloaded at the same time.
        stem = f"{file.digest}-{hashlib.sha256(file.name.encode()).hexdigest()[:8]}"
        whole = work / stem
        partial = work / f"{stem}.incomplete"
        if not whole.exists():
            with answers_read(repository, self.errors):
                _get(
                    hf_hub_url(name, file.name, repo_type=kind, revision=commit),
                    partial,
                    file,
                    bar,
                    arrived,
                )
            partial.rename(whole)
        else:
            arrived(file.size)
        return whole

    def explain(self, repository: Repository, error: Exception) -> PipelineError:
        """Return the error to show the user for `error`."""
        page = f"{constants.ENDPOINT}/{'datasets/' if repository.kind == 'dataset' else ''}{repository.name}"
        credentials = self.credentials
        if isinstance(error, RevisionResolutionError):
            return HubOutOfReach(
                f"{repository}: offline, and the cache {constants.HF_HUB_CACHE} does not know this "
                "revision; give `revision` a commit, or unset HF_HUB_OFFLINE"
            )
        if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403, 404):
            hint = next((word for kind, word in _HINTS.items() if isinstance(error, kind)), "")
            return refused(repository, error.response.status_code, page, credentials, hint)
        if isinstance(error, XetDownloadError):
            reason = plain(str(error), credentials.token)
            return HubError(
                f"{repository}: the accelerated download failed ({reason}); run again, or set "
                "HF_HUB_DISABLE_XET=1 to download by plain HTTP, as mirrors often need"
            )
        return broken(repository, error, credentials)


def _remote_file(
    name: str, size: int, blob_id: str, sha256: str | None, xet_hash: str | None
) -> RemoteFile:
    if sha256:
        return RemoteFile(name, size, "sha256", sha256, chunked=xet_hash is not None)
    return RemoteFile(name, size, "git", blob_id)


def _get(url: str, partial: Path, file: RemoteFile, bar: type[Any], arrived: Arrived) -> None:
    """Extend `partial` to the size of `file`, starting at its current end.

    Its name contains the hash of the content, so its bytes are the start of this content. A body
    whose size differs from the listing is left to the size and hash check that follows.
    """
    here_bytes = partial.stat().st_size if partial.exists() else 0
    if here_bytes > file.size:
        partial.unlink()
        here_bytes = 0
    arrived(here_bytes)
    # Without compression: sizes and offsets must be those of the file itself.
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    with partial.open("ab", buffering=0) as sink:
        try:
            http_get(
                url,
                sink,
                resume_size=here_bytes,
                headers=headers,
                expected_size=file.size,
                tqdm_class=bar,
            )
        except OSError as error:
            if error.errno is not None or isinstance(error, httpx2.HTTPError):
                raise


def _client_with_timeouts(inherited: list[Any]) -> httpx2.Client:
    """Return a client with the default client's request hooks, `inherited`, and ours."""
    hooks: dict[str, list[Any]] = {
        "request": [*inherited, _limit_waits],
        "response": [_raise_if_busy],
    }
    return httpx2.Client(event_hooks=hooks, follow_redirects=True)


def _limit_waits(request: httpx2.Request) -> None:
    """Set the missing timeouts of a request: the package lists files without any."""
    limits = httpx2.Timeout(constants.HF_HUB_DOWNLOAD_TIMEOUT).as_dict()
    asked = request.extensions.get("timeout", {})
    request.extensions["timeout"] = {
        name: asked.get(name) or limit for name, limit in limits.items()
    }


def _raise_if_busy(response: httpx2.Response) -> None:
    """Raise Busy for the statuses of a busy hub.

    The package itself would wait as long as the hub says, without limit, and does not parse dates.
    """
    if response.status_code in BUSY_STATUSES:
        limit = parse_ratelimit_headers(response.headers)
        spent_s = limit.reset_in_seconds if limit is not None and limit.remaining == 0 else None
        wait_s = retry_after_s(response.headers) if spent_s is None else float(spent_s)
        raise Busy(f"the hub answers HTTP {response.status_code}", wait_s)


def bar_telling(arrived: Arrived) -> type[Any]:
    """Return a stand-in for the client's progress bar that passes byte counts to `arrived`."""

    class Bar:
        def __init__(self, **_: Any) -> None:
            self.total = 0

        def __enter__(self) -> "Bar":
            return self

        def __exit__(self, *_: object) -> None:
            """Do nothing."""

        def update(self, n: float | None = 1) -> None:
            arrived(int(n or 0))

        def update_transfer(self, n: float | None = 1) -> None:
            arrived(0)  # bytes on the wire, every 10 MB; `update` counts those of the file

        def quiet(self, *_: Any, **__: Any) -> None:
            """Show nothing: the pipeline prints its own progress lines."""

        close = refresh = set_postfix_str = set_transfer_postfix_str = quiet

    return Bar
