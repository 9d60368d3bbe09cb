import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.config.compile import (
    Experiment,
    compile_config,
    open_experiment,
    pinned,
    refuse_other_version,
    run_digest,
)
from pipeline_lib.config.content import RUNNING_PYTHON, Content
from pipeline_lib.config.effects import EFFECTS, Effect, Result
from pipeline_lib.config.schema import Config, ExperimentModel
from pipeline_lib.config.section import settings_of
from pipeline_lib.config.train import PLACEMENT_KEYS, Train, in_file
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.core.store import Spec, Store
from pipeline_lib.hub.repository import Repository
from pipeline_lib.hub.snapshot import Revisions
from tests.config.keys import HUB, LOCAL, TINY, all_keys, base_of, plain, with_value

REPORT = {"report"}
EVALUATE = REPORT | {"evaluate"}
MERGE = EVALUATE | {"merge"}
TRAIN = MERGE | {"train", "plan"}
SHARD = TRAIN | {"shard", "baseline"}
TOKENIZE = SHARD | {"tokenize"}
DATA = TOKENIZE | {"data.0"}
MODEL = TOKENIZE | {"model"}
PLAN = {"plan"}
NAME = {"plan", "report"}
NOTHING: set[str] = set()

# Every key, and another value for it than the default: this table is the surface of the config. A
# key that goes breaks users' files; a key that begins to change a digest (config/effects.py) reruns
# their stages.
VALUES: dict[str, Any] = {
    "experiment": "other",
    "model(tiny).tokenizer": "tokenizers/other",
    "model(tiny).vocab_tokens": 4096,
    "model(tiny).hidden_size": 256,
    "model(tiny).layers": 2,
    "model(tiny).heads": 8,
    "model(tiny).seed": 1,
    "model(tiny).rope": {"type": "yarn", "factor": 4.0},
    "model(local).path": "models/moved",
    "model(local).adapter": {"source": "local", "path": "adapters"},
    "model(local).rope": {"type": "yarn", "factor": 4.0},
    "model(huggingface).name": "Qwen/Qwen3-4B",
    "model(huggingface).revision": "b" * 40,
    "model(huggingface).adapter": {
        "source": "huggingface",
        "name": "owner/adapters",
        "revision": "b" * 40,
    },
    "model(huggingface).rope": {"type": "yarn", "factor": 4.0},
    "model(experiment).name": "other",
    "model(experiment).config": "other.yaml",
    "model(experiment).adapter": "continue",
    "model(experiment).rope": {"type": "yarn", "factor": 4.0},
    "data.train(pydoc).weight": 0.5,
    "data.train(pydoc).max_rows": 100,
    "data.train(file).weight": 2.0,
    "data.train(file).format": "alpaca",
    "data.train(file).columns": {"output": "answer"},
    "data.train(file).roles": {"bot": "assistant"},
    "data.train(file).max_rows": 10,
    "data.train(file).path": "moved/*.jsonl",
    "data.train(file).split": "test",
    "data.train(huggingface).weight": 2.0,
    "data.train(huggingface).format": "text",
    "data.train(huggingface).columns": {"text": "body"},
    "data.train(huggingface).roles": {"bot": "assistant"},
    "data.train(huggingface).max_rows": 10,
    "data.train(huggingface).name": "owner/other",
    "data.train(huggingface).revision": "b" * 40,
    "data.train(huggingface).subset": "zh",
    "data.train(huggingface).split": "train_sft",
    "data.train(huggingface).files": ["data/*.parquet"],
    "data.validation": [{"source": "pydoc", "max_rows": 10}],
    "data.validation_fraction": 0.1,
    "tokenize.max_tokens": 64,
    "tokenize.over_long": "truncate",
    "tokenize.thinking": "mask",
    "tokenize.prompt_thinking": "on",
    "tokenize.chat_template_kwargs": {"reasoning_effort": "low"},
    "tokenize.train_on": "last_assistant",
    "tokenize.system": "Be brief.",
    "tokenize.tools": [{"type": "function", "function": {"name": "clock"}}],
    "tokenize.duplicates": "drop",
    "tokenize.near_duplicates": 0.9,
    "tokenize.max_dropped_fraction": 0.5,
    "tokenize.max_quarantined_fraction": 0.5,
    "shard.block_tokens": 2048,
    "shard.shards": 2,
    "shard.seed": 1,
    "cluster.nodes": 2,
    "cluster.gpus_per_node": 8,
    "cluster.gpu": "h200",
    "cluster.gpu_hour_price": 2.5,
    "cluster.internode_gbit_s": 9.0,
    "cluster.intranode_gbyte_s": 100.0,
    "cluster.measured": "cluster.json",
    "cluster.cpu_ranks": 4,
    "cluster.launcher": "srun",
    "cluster.cpus_per_rank": 4,
    "cluster.memory_gb": 64,
    "cluster.runtime_minutes": 10,
    "cluster.max_requeues": 3,
    "train.strategy": "fsdp",
    "train.shard_ranks": 2,
    "train.context_ranks": 2,
    "train.unit_layers": 2,
    "train.offload": "optimizer",
    "train.activation_checkpointing": "full",
    "train.offload_activations": False,
    "train.kept_attention_layers": 0,
    "train.reshard_after_forward": False,
    "train.compile": True,
    "train.attention": "flash",
    "train.deepspeed_json": "zero.json",
    "train.micro_batch_blocks": 2,
    "train.save_every_steps": 5,
    "train.save_async": False,
    "train.keep_last": 5,
    "train.timeout_s": 60,
    "train.start_timeout_s": 60,
    "train.sample_every_steps": 5,
    "train.profile_every_steps": 5,
    "train.deterministic": True,
    "train.method": "full",
    "train.precision": "fp32",
    "train.optimizer": "adamw_8bit",
    "train.gradient_compression": "powersgd",
    "train.powersgd_rank": 2,
    "train.local_sgd_steps": 4,
    "train.global_batch_tokens": 131072,
    "train.global_batch_samples": 64,
    "train.epochs": 0.5,
    "train.max_steps": 100,
    "train.until_step": 10,
    "train.lr": 1e-4,
    "train.lr_schedule": "linear",
    "train.warmup_fraction": 0.1,
    "train.warmup_steps": 10,
    "train.decay_fraction": 0.2,
    "train.min_lr_fraction": 0.1,
    "train.weight_decay": 0.0,
    "train.beta1": 0.8,
    "train.beta2": 0.9,
    "train.adam_eps": 1e-6,
    "train.max_grad_norm": 0.5,
    "train.freeze": ["model.embed_tokens.*"],
    "train.router_aux_loss": 0.0,
    "train.validate_every_steps": 10,
    "train.early_stop_validations": 3,
    "train.keep_best": True,
    "train.guards.spike_deviations": 10.0,
    "train.guards.window_steps": 32,
    "train.guards.max_skips": 5,
    "train.guards.rollback_every_steps": 50,
    "train.seed": 1,
    "train.replica": "b",
    "train.lora.rank": 8,
    "train.lora.alpha": 16,
    "train.lora.dropout": 0.1,
    "train.lora.targets": ["q_proj"],
    "train.lora.rslora": True,
    "train.lora.dora": True,
    "train.lora.base": "nf4",
    "train.lora.lr_ratio": 16.0,
    "tracking.to": ["tensorboard"],
    "tracking.project": "other",
    "merge.dtype": "fp32",
    "merge.base": "original",
    "merge.average": {"last": 2},
    "evaluate.prompts": ["Who are you?"],
    "evaluate.generations": 2,
    "evaluate.max_new_tokens": 8,
    "evaluate.benchmarks": [{"name": "faq", "path": "faq.jsonl", "score": "number"}],
    "ship.gain": {"faq": 0.1},
    "ship.keep": {"faq": -0.1},
    "ship.loops": 0.1,
    "ship.unended": 0.1,
    "export": ["gguf-f16"],
    "report.language": "zh",
    "push.huggingface": "org/name",
    "push.modelscope": "org/name",
}
BENCHMARKS = [{"name": "faq", "path": "faq.jsonl"}]
# What both models are asked with.
ASKED_WITH = {"tokenize.system", "tokenize.tools", "tokenize.chat_template_kwargs"}
CONTENT = Content(model={"config.json": "0" * 64}, data=({"rows.jsonl": "1" * 64},))


def compiled(config: dict[str, Any], content: Content = CONTENT) -> Experiment:
    read = Config.model_validate_json(json.dumps(config))
    number = len(read.data.sources)
    questions = ({"questions.jsonl": "2" * 64},) * len(read.evaluate.benchmarks)
    data = (content.data * number)[:number]
    parent = None
    if isinstance(read.model, ExperimentModel):
        text = Config.model_validate_json(json.dumps({**TINY, "experiment": "text"}))
        parent = Content(model={}, data=({},))
        model = read.model.model_copy(update={"parent": text})
        read = read.model_copy(update={"model": model})
    given = replace(content, data=data, questions=questions, parent=parent)
    return compile_config(read, given)


def with_benchmark(config: dict[str, Any]) -> dict[str, Any]:
    """The config with a benchmark, unless it has one, so that it has every stage."""
    evaluate = {"benchmarks": BENCHMARKS, **config.get("evaluate", {})}
    return {**config, "evaluate": evaluate}


def digests(experiment: Experiment) -> dict[str, str]:
    return {part: spec.digest for part, spec in experiment.specs.items()}


def changed(one: Experiment, other: Experiment) -> set[str]:
    before, after = digests(one), digests(other)
    return {part for part in before.keys() | after.keys() if before.get(part) != after.get(part)}


def test_the_table_has_every_key_of_the_schema() -> None:
    assert list(VALUES) == [key for key in all_keys() if not key.endswith(".source")]


def effect_of(key: str) -> Effect | None:
    """Return what `key` changes: `model(tiny).layers`, `train.lora.rank`; None without a stage.

    A key in a section of its own has the effect of the section.
    """
    plain = re.sub(r"\(\w+\)", "", key)
    while key:
        for name in (key, plain):
            if name in EFFECTS:
                return EFFECTS[name]
        key = key.rpartition(".")[0]
        plain = plain.rpartition(".")[0]
    return None


@pytest.mark.parametrize("key", VALUES)
def test_a_key_changes_what_the_table_says_and_nothing_else(key: str) -> None:
    effect = effect_of(key)
    assert effect is not None
    downloaded = (
        "data.1"
        if key == "data.validation"
        else key.partition("(")[0].replace("data.train", "data.0")
    )
    affected = {downloaded if stage == "download" else stage for stage in effect.stages}
    is_of_model = downloaded == "model" and "download" in effect.stages
    if "export" in affected:  # the stage of parts that only `export` asks for
        affected = {"gguf-f16"} if key == "export" else affected - {"export"}
    # and so is that of what only `push` asks for
    affected -= {"push"}
    if key.startswith("push."):
        affected = {key.replace(".", "_")}
    if key == "merge.average":
        affected.add("last_merge")
    if (
        effect.stages[0:1] == ("evaluate",)
        or "shard" in effect.stages
        or plain(key) == "model.rope"
    ):
        affected.add("baseline")  # the base's evaluation, of the same stage
    if is_of_model or plain(key) in {"model.rope", "evaluate.benchmarks", *ASKED_WITH}:
        affected.add("base_benchmark")

    if plain(key) == "model.adapter":
        affected.add("adapter")
    if key == "model(experiment).adapter":  # the model is that of the parent, and beside it
        affected |= {"model", "parent"}

    before = compiled(with_benchmark(base_of(key)))
    assert changed(before, compiled(with_benchmark(with_value(key, VALUES[key])))) == affected


@pytest.mark.parametrize("key", EFFECTS)
def test_what_changes_a_result_changes_a_digest_and_what_changes_none_leaves_the_training(
    key: str,
) -> None:
    effect, computing = EFFECTS[key], {"train", "merge", "export", "evaluate", "benchmark"}
    changes_result = effect.result == Result.YES
    assert changes_result == bool(computing & {*effect.stages}) or key == "train.replica"


def test_the_table_has_no_key_that_the_schema_lacks() -> None:
    """Those of `source` decide which other keys there are."""
    known = {
        name for key in all_keys() for name in (key, plain(key), plain(key).rpartition(".")[0])
    }
    assert EFFECTS.keys() - known == set()


@pytest.mark.parametrize(
    "approximation", [{"local_sgd_steps": 4}, {"gradient_compression": "powersgd"}]
)
@pytest.mark.parametrize(
    "changed_by", [{"cluster": {"cpu_ranks": 4}}, {"train": {"micro_batch_blocks": 2}}]
)
def test_what_ranks_are_dealt_decides_a_training_in_which_each_approximates_by_itself(
    approximation: dict[str, Any], changed_by: dict[str, Any]
) -> None:
    def of(train: dict[str, Any], sections: dict[str, Any]) -> Experiment:
        return compiled({**TINY, **sections, "train": {**train, **sections.get("train", {})}})

    assert changed(of(approximation, {}), of(approximation, changed_by)) == TRAIN
    assert changed(of({}, {}), of({}, changed_by)) == PLAN


@pytest.mark.parametrize("kind", ["tiny", "local", "huggingface"])
def test_a_factor_of_one_stretches_nothing(kind: str) -> None:
    key = f"model({kind}).rope"
    assert (
        changed(compiled(base_of(key)), compiled(with_value(key, {"type": "yarn", "factor": 1.0})))
        == NOTHING
    )


def test_the_content_of_a_deepspeed_json_is_part_of_the_plan_and_where_it_lies_is_not() -> None:
    def of(path: str, content: str) -> Experiment:
        config = {**TINY, "train": {"strategy": "zero2", "deepspeed_json": path}}
        return compiled(config, Content(CONTENT.model, CONTENT.data, deepspeed_json=content))

    base = of("zero.json", "{}")
    assert changed(base, of("moved.json", "{}")) == NOTHING
    assert changed(base, of("zero.json", '{"steps_per_print":9}')) == PLAN
    assert (
        of("zero.json", '{"steps_per_print":9}')
        .specs["plan"]
        .settings["train"]["deepspeed_json"]
        .startswith("{")
    )


def test_what_was_measured_is_part_of_the_plan_and_where_it_lies_is_not() -> None:
    rates, others = ({"rates": {"copy_bytes_s": {"value": value}}} for value in (1e9, 2e9))
    base = compiled(TINY, Content(CONTENT.model, CONTENT.data, rates))

    assert changed(compiled(TINY), base) == PLAN
    assert changed(base, compiled(TINY, Content(CONTENT.model, CONTENT.data, others))) == PLAN
    assert base.specs["plan"].settings["measured"] == rates


def test_the_plan_is_told_what_auto_has_to_leave_as_it_is() -> None:
    """Also where the value given is the default: without it the plan would choose another."""
    free, held = (
        {"strategy": "auto", **given}
        for given in ({}, {"micro_batch_blocks": 1, "recompute": "full"})
    )
    plans = [compiled({**TINY, "train": train}).specs["plan"] for train in (free, held)]

    as_free = compiled({**TINY, "train": {"strategy": "auto", "recompute": "auto"}}).specs["plan"]

    assert [plan.settings["held"] for plan in plans] == [[], ["micro_batch_blocks", "recompute"]]
    assert as_free.digest == plans[0].digest
    assert plans[0].digest != plans[1].digest
    assert "held" not in compiled(with_value("train.micro_batch_blocks", 2)).specs["plan"].settings


def test_what_says_only_where_and_how_often_decides_the_plan_alone() -> None:
    in_table = {key for key, effect in EFFECTS.items() if {*effect.stages} == PLAN}

    whole = {key for key in VALUES if key.startswith(("cluster.", "tracking."))} - {
        "cluster.measured"
    }
    assert in_table == whole | {in_file(key) for key in PLACEMENT_KEYS}


@pytest.mark.parametrize("base", [TINY, LOCAL, HUB], ids=["tiny", "local", "hub"])
def test_a_default_that_is_written_out_changes_nothing(base: dict[str, Any]) -> None:
    complete = json.loads(Config.model_validate_json(json.dumps(base)).model_dump_json())

    assert complete["train"]["lora"]["rank"] == 16
    assert changed(compiled(base), compiled(complete)) == NOTHING


def test_sources_are_part_of_what_is_computed() -> None:
    assert changed(compiled(TINY), compiled({**TINY, "model": LOCAL["model"]})) == MODEL
    assert changed(compiled(TINY), compiled({**TINY, "data": LOCAL["data"]})) == DATA


def test_content_is_part_of_what_is_computed() -> None:
    base = compiled(LOCAL)

    other_model = compiled(LOCAL, Content({"config.json": "2" * 64}, CONTENT.data))
    other_data = compiled(LOCAL, Content(CONTENT.model, ({"rows.jsonl": "2" * 64},)))

    assert changed(base, other_model) == MODEL
    assert changed(base, other_data) == DATA


def test_another_source_leaves_the_first_one_as_it_is() -> None:
    two: dict[str, Any] = {
        **TINY,
        "data": {"train": [{"source": "pydoc"}, {"source": "pydoc", "max_rows": 9}]},
    }
    content = Content(CONTENT.model, CONTENT.data * 2)

    assert changed(compiled(TINY), compiled(two, content)) == TOKENIZE | {"data.1"}


def test_a_run_keeps_its_working_directory_wherever_it_is_told_to_stop() -> None:
    runs = {
        run_digest(compiled(with_value("train.until_step", step)).specs["train"])
        for step in (None, 10, 20)
    }

    assert len(runs) == 1
    assert runs == {compiled(TINY).specs["train"].digest}
    assert run_digest(compiled(with_value("train.lr", 1e-4)).specs["train"]) not in runs


YAML = """\
experiment: demo
model: {source: tiny}
data:
  train: [{source: pydoc, max_rows: 100}]
train: {lr: 0.0001, epochs: 2}
"""
SAME_YAML = """\
# The same, in another order and another style.
"train":
    epochs:   2     # passes
    'lr':     1e-4
    save_every_steps: auto

data:
    train:
    -   max_rows: 1_00
        source: pydoc
model:
    source: "tiny"
experiment: 'demo'
"""


def test_comments_order_and_style_of_the_yaml_change_nothing(tmp_path: Path) -> None:
    one, same = tmp_path / "one.yaml", tmp_path / "same.yaml"
    one.write_text(YAML)
    same.write_text(SAME_YAML)
    store = Store(tmp_path / "store")

    assert changed(open_experiment(one, store), open_experiment(same, store)) == NOTHING


def test_branches_are_replaced_by_commits_and_the_config_records_them(tmp_path: Path) -> None:
    revisions = Revisions(tmp_path / "revisions.json")
    model = Repository("huggingface", "model", "o/m")
    rows = Repository("modelscope", "dataset", "o/d")
    for repository, revision, commit in ((model, "v1", "1" * 40), (rows, None, "2" * 40)):
        revisions.entries[f"{repository} {revision or 'main branch'}"] = {"commit": commit}
    config = Config.model_validate_json(
        json.dumps(
            {
                "experiment": "demo",
                "model": {"source": "huggingface", "name": "o/m", "revision": "v1"},
                "data": {"train": [{"source": "modelscope", "name": "o/d"}, {"source": "pydoc"}]},
            }
        )
    )

    found = pinned(config, revisions)

    assert found.model.model_dump()["revision"] == "1" * 40
    assert found.data.train[0].model_dump()["revision"] == "2" * 40
    assert found.data.train[1] == config.data.train[1]
    specs = compile_config(found, Content({}, ({}, {"python": "3"}))).specs
    assert specs["model"].settings == {
        "kind": "model",
        "source": "huggingface",
        "name": "o/m",
        "revision": "1" * 40,
    }
    assert specs["data.0"].settings["revision"] == "2" * 40


def test_a_commit_asks_no_hub(tmp_path: Path) -> None:
    config = Config.model_validate_json(json.dumps(HUB))
    path = tmp_path / "revisions.json"

    assert pinned(config, Revisions(path)) == config
    assert not path.exists()


def test_the_context_of_prompts_is_part_of_the_evaluation_and_of_nothing_without_prompts() -> None:
    sections = {
        "experiment": "x",
        "model": {"source": "tiny"},
        "data": {"train": [{"source": "pydoc"}]},
    }
    contexts = []
    for prompts in ([], ["Who are you?"]):
        asked_with = {"system": "You are one.", "chat_template_kwargs": {"reasoning_effort": "low"}}
        given = {
            **sections,
            "tokenize": {**asked_with, "thinking": "mask"},
            "evaluate": {"prompts": prompts},
        }
        config = Config.model_validate_json(json.dumps(given))
        found = compile_config(
            config, Content(dict(RUNNING_PYTHON), (dict(RUNNING_PYTHON),))
        ).specs["evaluate"]
        contexts.append(found.settings.get("context"))
    assert contexts == [None, asked_with]


def test_the_digests_of_a_config_never_change() -> None:
    """All users' results hang on them; a stage version bumped on purpose changes them here."""
    assert digests(compiled(TINY)) == {
        "model": "2ee978dff2974324",
        "data.0": "dceee265e3fe3e37",
        "tokenize": "5163851f986d89e0",
        "shard": "d7abeb47a98ddeb9",
        "plan": "dd9ab586cac27552",
        "train": "818e22097ac316e5",
        "merge": "a9a7eca60a373306",
        "baseline": "3d1b995ec9fa171d",
        "evaluate": "6ec96890e19b6f42",
        "report": "82f5e48e7ca98548",
    }


@pytest.mark.parametrize(
    ("train", "version"),
    [({}, 4), ({"lr_schedule": "constant"}, 3), ({"method": "lora", "lora": {"dropout": 0.1}}, 5)],
)
def test_a_queued_spec_of_another_version_is_refused(train: dict[str, Any], version: int) -> None:
    ours = Spec("train", version, settings_of(Train.model_validate(train)))
    refuse_other_version(ours)
    with pytest.raises(
        ConfigError,
        match=rf"version {version - 1} of the stage, and this code computes .* {version};",
    ):
        refuse_other_version(replace(ours, version=version - 1))
