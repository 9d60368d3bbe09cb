"""A finished model is pushed to a hub on loopback when the config asks, and once."""

import json

import pytest

from tests.pipeline.conftest import Project, executed
from tests.upload_hub import taking_uploads

pytestmark = pytest.mark.slow  # with its own programs: the client reads the hub's address once

SECRET = "hf_abcdefghijklmnopqrstuvwx"


def test_the_model_is_pushed_last_and_the_token_is_nowhere(finished: Project) -> None:
    project = finished
    assert not (project.store.root / "push").exists()
    project.config.write_text(f"{project.config.read_text()}push: {{huggingface: org/name}}\n")
    with taking_uploads() as hub:
        project.environment |= {
            "HF_ENDPOINT": hub.url,
            "HF_TOKEN": SECRET,
            "HF_HUB_DISABLE_XET": "1",
        }
        hub.refused = "/commit/"
        refused = project.snakemake(check=False)
        assert "HF_TOKEN has to be one that may write to" in refused.stdout
        assert not hub.commits
        hub.refused = ""
        done = project.run("python", "-m", "pipeline_lib", "run", "config/config.yaml")
        assert len(hub.uploads) == 1
        assert "Nothing to be done" in project.snakemake("-n").stdout
    assert hub.private == {"org/name": True}
    assert set(hub.blobs) == set(project.weights().values())
    [commit] = hub.commits
    assert f"merge {project.experiment().ref('merge').digest}" in commit
    pushed = json.loads((project.root / "results/small/push_huggingface").read_text())
    assert pushed == {
        "hub": "huggingface",
        "repository": "org/name",
        "page": f"{hub.url}/org/name",
    }
    assert executed(refused.stdout) == ["push"]
    assert SECRET not in done.stdout + refused.stdout
    for path in project.root.rglob("*"):
        if path.is_file() and not path.is_symlink():
            assert SECRET.encode() not in path.read_bytes(), path
