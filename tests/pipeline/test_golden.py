"""Today's code continues what users of earlier code have: digests of specs, stores and runs."""

import json
from pathlib import Path

import pytest

from tests.golden.configs import CONFIGS
from tests.golden.make import (
    FINISHED,
    SPECS,
    UNFINISHED,
    cpu_model,
    finished_state,
    pinned_specs,
    unpack,
)
from tests.pipeline.conftest import Project, sealed_times

pytestmark = pytest.mark.usefixtures("forked_processes")

# What the same earlier code came to on another processor whose name is no more than "AMD EPYC"
# (family 25, model 1).
OF_OTHERS_OF_THE_NAME = [
    {"model.safetensors": "d2011964fb110d32aacd1af43b00dad5dfa64295d8bc3a2b08fef7a0869ea6af"}
]


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return pinned_specs(tmp_path_factory.mktemp("specs"))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_compiles_to_the_specs_that_it_had(specs: dict[str, object], name: str) -> None:
    assert json.loads(json.dumps(specs[name])) == json.loads(SPECS.read_text())[name]


@pytest.mark.slow
def test_a_finished_experiment_of_earlier_code_has_nothing_to_do(project: Project) -> None:
    unpack(project)
    before = sealed_times(project)
    assert "Nothing to be done" in project.snakemake("--configfile", FINISHED).stdout
    assert sealed_times(project) == before
    project.run("python", "-m", "pipeline_lib", "store", "verify")
    report = project.root / "results" / Path(FINISHED).stem / "report.html"
    assert report.resolve().is_relative_to(project.store.root)


@pytest.mark.slow
def test_an_interrupted_training_of_earlier_code_comes_to_the_same_bits(project: Project) -> None:
    expected = unpack(project)
    project.snakemake("--configfile", UNFINISHED)
    found = finished_state(project)
    events = (
        project.sealed("train", project.experiment(project.root / UNFINISHED)) / "events.jsonl"
    ).read_text()
    assert events.count('"run.resumed"') == 1
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-2)
    if found["machine"] == expected["machine"]:  # another processor may round sums in another order
        assert found["weights"] in (expected["weights"], *OF_OTHERS_OF_THE_NAME), cpu_model()
