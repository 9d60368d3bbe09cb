"""Uploading a folder to a repository of a hub, by the hub's own package.

A repository that is not there is made, private. What the hub has already is not sent again, so that
an upload that was interrupted goes on. No token is in any message.
"""

from pathlib import Path

from pipeline_lib.core.errors import HubError, PipelineError
from pipeline_lib.core.store import MANIFEST_NAME
from pipeline_lib.hub.refusals import (
    Credentials,
    answers_read,
    broken,
    plain,
    refuse_impossible_token,
)
from pipeline_lib.hub.repository import Repository

_NOT_SENT = [MANIFEST_NAME]  # of the store
_REFUSING = (401, 403, 404)
_TRACKER = "modelscope-upload"  # what the client knows of an upload that it has begun


def upload(repository: Repository, folder: Path, message: str, licence: str, work: Path) -> str:
    """Upload `folder` to `repository` with the commit `message`; return the address of its page.

    `work` is a folder that survives a failure; `licence` is the hubs' name of the model's licence.
    Raises HubError, naming the variable of the token, if the hub refuses it or is out of reach.
    """
    if repository.hub == "huggingface":
        return _to_hugging_face(repository, folder, message)
    return _to_modelscope(repository, folder, message, licence, work)


def _to_hugging_face(repository: Repository, folder: Path, message: str) -> str:
    import httpx2
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # lazy

    credentials = _credentials(repository, "HF_TOKEN", get_token())
    page = f"{constants.ENDPOINT}/{repository.name}"
    disable_progress_bars()
    api = HfApi()
    known = (httpx2.HTTPError, OSError, RuntimeError)
    try:
        with answers_read(repository, known):
            api.create_repo(repository.name, private=True, exist_ok=True)
            api.upload_folder(
                repo_id=repository.name,
                folder_path=folder,
                commit_message=message,
                ignore_patterns=_NOT_SENT,
            )
    except HfHubHTTPError as error:
        raise _refused(repository, error.response.status_code, page, credentials, error) from error
    except known as error:
        raise broken(repository, error, credentials) from error
    return page


def _to_modelscope(
    repository: Repository, folder: Path, message: str, licence: str, work: Path
) -> str:
    import requests
    from modelscope_hub import HubApi
    from modelscope_hub.config import HubConfig
    from modelscope_hub.errors import APIError, StorageError
    from modelscope_hub.errors import HubError as ClientError

    config = HubConfig()
    credentials = _credentials(repository, "MODELSCOPE_API_TOKEN", config.token)
    page = f"{config.endpoint}/models/{repository.name}"
    api = HubApi(config)
    known = (ClientError, requests.RequestException, OSError)
    try:
        with answers_read(repository, known):
            if not api.repo_exists(repository.name, "model"):
                api.create_repo(repository.name, "model", visibility="private", license=licence)
            api.upload_folder(
                repository.name,
                "model",
                folder,
                commit_message=message,
                ignore_patterns=_NOT_SENT,
                use_cache=True,
                disable_tqdm=True,
                tracker_path=work / _TRACKER,
            )
    except APIError as error:
        raise _refused(repository, error.status_code or 0, page, credentials, error) from error
    except StorageError as error:  # of files, for reasons that the client has written to its log
        raise HubError(
            f"{repository}: {plain(str(error), credentials.token)}; the client's lines above say "
            f"why: a token in {credentials.variable} that may not write to {plain(page)} is one "
            "reason. Run again: what has arrived is kept"
        ) from error
    except known as error:
        raise broken(repository, error, credentials) from error
    return page


def _credentials(repository: Repository, variable: str, token: str | None) -> Credentials:
    """Return the token in use. Raises HubError without one, or for what no token is."""
    credentials = Credentials(variable, token)
    refuse_impossible_token(credentials)
    if token is None:
        raise HubError(
            f"{repository}: {variable} is not set; set it to a token that may write there"
        )
    return credentials


def _refused(
    repository: Repository, status: int, page: str, credentials: Credentials, error: Exception
) -> PipelineError:
    if status not in _REFUSING:
        return broken(repository, error, credentials)
    return HubError(
        f"{repository}: HTTP {status}: {plain(str(error), credentials.token)}; the token in "
        f"{credentials.variable} has to be one that may write to {plain(page)}"
    )
