"""A folder is uploaded by the hubs' own clients, goes on where it stopped, and tells no token."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from pipeline_lib.core.errors import HubError
from pipeline_lib.core.files import sha256_file
from pipeline_lib.hub.repository import Repository
from pipeline_lib.hub.upload import upload
from tests.fake_hub import FakeHub, point_clients
from tests.upload_hub import UploadHub, taking_uploads

SECRET = "hf_abcdefghijklmnopqrstuvwx"
HUBS: tuple[Literal["huggingface", "modelscope"], ...] = ("huggingface", "modelscope")
VARIABLES = {"huggingface": "HF_TOKEN", "modelscope": "MODELSCOPE_API_TOKEN"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[UploadHub]:
    with taking_uploads() as hub:
        clients = FakeHub()
        clients.url = hub.url
        point_clients(clients, tmp_path / "clients", monkeypatch)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        for variable in VARIABLES.values():
            monkeypatch.setenv(variable, SECRET)
        yield hub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "adapter").mkdir(parents=True)
    for number in (1, 2):
        (folder / f"model-{number}.safetensors").write_bytes(bytes([number]) * 5000)
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text("---\nlibrary_name: transformers\n---\n# A model\n")
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    (folder / "manifest.json").write_text("{}")
    return folder


def uploaded(kind: Literal["huggingface", "modelscope"], folder: Path) -> str:
    repository = Repository(kind, "model", "org/name")
    return upload(repository, folder, "merge 0123", "other", folder.parent)


@pytest.mark.parametrize("kind", HUBS)
def test_every_file_of_the_model_arrives_in_a_private_repository(
    hub: UploadHub, folder: Path, kind: Literal["huggingface", "modelscope"]
) -> None:
    before = {path: sha256_file(path) for path in folder.rglob("*") if path.is_file()}
    page = uploaded(kind, folder)
    assert page.startswith(hub.url)
    assert page.endswith("org/name")
    assert hub.private == {"org/name": True}
    weights = {sha256_file(path) for path in folder.glob("*.safetensors")}
    assert hub.blobs.keys() == weights
    [commit] = hub.commits
    for name in ("config.json", "README.md", "adapter/adapter_config.json", "model-1.safetensors"):
        assert f'"{name}"' in commit
    assert "manifest.json" not in commit
    assert SECRET in hub.tokens
    # nothing is written into the sealed folder
    assert {path: sha256_file(path) for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("kind", HUBS)
def test_an_upload_that_stopped_goes_on_and_tells_no_token(
    hub: UploadHub,
    folder: Path,
    kind: Literal["huggingface", "modelscope"],
    capfd: pytest.CaptureFixture[str],
) -> None:
    hub.refused = "/commit/"
    with pytest.raises(HubError) as caught:
        uploaded(kind, folder)
    assert VARIABLES[kind] in str(caught.value)
    assert "write to" in str(caught.value)
    assert len(hub.uploads) == 2
    hub.refused = ""
    uploaded(kind, folder)
    assert len(hub.uploads) == 2  # no file of weights twice
    assert len(hub.commits) == 1
    said = capfd.readouterr()
    assert SECRET not in f"{caught.value}{said.out}{said.err}"


@pytest.mark.parametrize("kind", HUBS)
def test_without_a_token_its_variable_is_named(
    hub: UploadHub,
    folder: Path,
    kind: Literal["huggingface", "modelscope"],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(VARIABLES[kind])
    with pytest.raises(HubError, match=f"{VARIABLES[kind]} is not set"):
        uploaded(kind, folder)
    assert not hub.commits


@pytest.mark.parametrize("kind", HUBS)
def test_a_hub_out_of_reach_is_named(
    hub: UploadHub,
    folder: Path,
    kind: Literal["huggingface", "modelscope"],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match=f"{kind} model org/name: .*check the network"):
        uploaded(kind, folder)
