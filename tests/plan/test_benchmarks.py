"""What benchmarks and exports cost is in the plan and in the requests of jobs beforehand."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.config.schema import Config
from pipeline_lib.core.files import write_jsonl
from pipeline_lib.core.store import Store
from pipeline_lib.plan.answer import answer, question_of
from pipeline_lib.plan.benchmarks import Asking, asking_s, askings_of
from pipeline_lib.plan.known import find_geometry
from pipeline_lib.records.plan import Need
from pipeline_lib.slurm.sizing import stage_request

H100 = {"gpus_per_node": 8, "gpu": "h100"}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def config_of(folder: Path, questions: int, **keys: Any) -> Config:
    rows = [{"question": "x" * 300, "choices": ["yes", "no"], "answer": 0}] * questions
    write_jsonl(folder / "faq.jsonl", rows)
    faq = {"name": "faq", "path": str(folder / "faq.jsonl"), **keys.pop("benchmark", {})}
    sections = {
        "experiment": "costs",
        "model": {"source": "modelscope", "name": "Qwen/Qwen3-8B", "revision": "a" * 40},
        "data": {"train": [{"source": "file", "path": "rows.jsonl"}]},
        "cluster": H100,
        "train": {"strategy": "fsdp"},
        "evaluate": {"benchmarks": [faq] if questions else []},
        **keys,
    }
    return Config.model_validate_json(json.dumps(sections))


def test_the_tokens_of_questions_are_counted(tmp_path: Path) -> None:
    [asking] = askings_of(config_of(tmp_path, 10, benchmark={"max_new_tokens": 64}))
    assert asking == Asking(questions=10, read_tokens=10 * 120, new_tokens=64)
    assert asking.generated_tokens == 640
    shots = {"few_shot": 2, "max_questions": 5, "score": "choice"}
    [asking] = askings_of(config_of(tmp_path, 10, benchmark=shots))
    assert (asking.questions, asking.generated_tokens) == (5, 0)
    # three prompts with two answers, once for each choice, and the choice
    assert asking.read_tokens == 5 * 2 * (20 + 302 + 1)


def test_a_file_that_cannot_be_read_costs_nothing_and_is_named_elsewhere(tmp_path: Path) -> None:
    config = config_of(tmp_path, 1)
    (tmp_path / "faq.jsonl").unlink()
    assert askings_of(config) == ()


def test_the_time_goes_with_what_is_generated(tmp_path: Path, store: Store) -> None:
    config = config_of(tmp_path, 1)
    question = question_of(config, store)
    geometry = find_geometry(config, store)
    assert geometry is not None
    machine = question.machine
    assert machine is not None

    def seconds(questions: int, new_tokens: int) -> float:
        asked = Asking(questions, 100 * questions, new_tokens)
        return asking_s(geometry, [asked], machine).value

    assert 10.0 < seconds(500, 256) < 600.0
    assert seconds(500, 512) > 1.8 * seconds(500, 256)
    assert seconds(50_000, 256) > 10 * seconds(500, 256)
    assert seconds(500, 0) < 0.2 * seconds(500, 256)


def needs(config: Config, store: Store) -> dict[str, Need]:
    return {need.stage: need for need in answer(question_of(config, store)).content.stages}


def test_the_plan_has_a_row_for_each_that_is_asked_for(tmp_path: Path, store: Store) -> None:
    without = needs(config_of(tmp_path, 0), store)
    assert not {"benchmark", "fp8", "gguf-f16"} & without.keys()
    config = config_of(tmp_path, 500, export=["gguf-f16", "fp8"])
    found = needs(config, store)
    assert list(found)[-5:] == ["merge", "gguf-f16", "fp8", "evaluate", "benchmark"]
    assert found["benchmark"].gpus == 1
    assert found["benchmark"].gpu_bytes > 2 * 8e9
    expected = "each of both models: 500 questions, up to 128,000 tokens to generate"
    assert found["benchmark"].note == expected
    file, folder = found["gguf-f16"].disk_bytes, found["fp8"].disk_bytes
    assert file is not None
    assert folder is not None
    assert file > folder > 8e9


def test_a_job_asks_for_the_time_of_its_questions(tmp_path: Path, store: Store) -> None:
    few = stage_request("benchmark", config_of(tmp_path, 10), store, 0)
    many = stage_request("benchmark", config_of(tmp_path, 200_000), store, 0)
    assert (few.gpus_per_node, many.gpus_per_node) == (1, 1)
    assert many.runtime_minutes > few.runtime_minutes + 30


def test_a_mean_of_checkpoints_keeps_the_adapters_of_all(tmp_path: Path, store: Store) -> None:
    lora = {"strategy": "fsdp", "method": "lora", "save_every_steps": 10, "keep_last": 9}
    one = needs(config_of(tmp_path, 0, train=lora), store)["merge"]
    several = needs(config_of(tmp_path, 0, train=lora, merge={"average": {"last": 8}}), store)
    assert several["merge"].host_bytes > one.host_bytes
