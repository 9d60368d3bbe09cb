from dataclasses import dataclass, field
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download
from modelscope_hub import HubApi
from modelscope_hub.config import HubConfig

from pipeline_lib.hub.repository import Kind, Repository
from pipeline_lib.hub.snapshot import Snapshot
from tests.fake_hub import Change, FakeHub, Files

NAME = "owner/thing"


@dataclass
class Fetcher:
    """Fetches a whole repository of the fake hub, by the client of one of the real ones."""

    hub: FakeHub
    client: str
    root: Path
    kind: Kind = "model"
    said: list[str] = field(default_factory=list)

    @property
    def repository(self) -> Repository:
        return Repository(self.client, self.kind, NAME)  # type: ignore[arg-type]

    def add(self, files: Files) -> str:
        """Put `files` on the hub; the commit."""
        return self.hub.add(self.kind, NAME, files)[1]

    def fault_listing(self, change: Change) -> None:
        """Change every listing of files that the hub answers, whichever client asks."""
        for where in ("/tree/", "/repo/files"):
            self.hub.fault(where, change, times=99)

    def fetch(self, commit: str, out: str = "out") -> Files:
        """All files at `commit`, as they lie in the folder `out` afterwards."""
        snapshot = Snapshot(self.repository, commit, self.root / "work", self.said.append)
        folder = self.root / out
        snapshot.fetch(list(snapshot.files), folder, lambda here, total: None)
        return {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }


@pytest.fixture(params=["huggingface", "modelscope"])
def fetcher(request: pytest.FixtureRequest, hub: FakeHub, tmp_path: Path) -> Fetcher:
    return Fetcher(hub, request.param, tmp_path)


def download_by_the_client_itself(fetcher: Fetcher, revision: str) -> None:
    """Everything at `revision`, into the cache of the client, as its own command does."""
    if fetcher.client == "huggingface":
        snapshot_download(NAME, revision=revision)
    else:
        HubApi(HubConfig()).download_repo(NAME, "model", revision=revision)
