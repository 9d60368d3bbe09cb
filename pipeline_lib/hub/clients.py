"""The client of each hub, and calls of it that end in a result or in one clear error."""

from collections.abc import Callable
from typing import TypeVar

from pipeline_lib.hub.patience import in_time, patiently
from pipeline_lib.hub.repository import HubClient, Repository, is_commit

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
