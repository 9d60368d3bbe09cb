import json
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.config.compile import Experiment, compile_config, open_experiment, pinned, run_digest
from pipeline_lib.config.content import RUNNING_PYTHON, Content
from pipeline_lib.config.schema import Config
from pipeline_lib.config.train import PLACEMENT_KEYS, in_file
from pipeline_lib.core.store import Store
from pipeline_lib.hub.repository import Repository
from pipeline_lib.hub.snapshot import Revisions
from tests.config.keys import HUB, LOCAL, TINY, all_keys, base_of, with_value

REPORT = {"report"}
EVALUATE = REPORT | {"evaluate"}
MERGE = EVALUATE | {"merge"}
TRAIN = MERGE | {"train", "plan"}
SHARD = TRAIN | {"shard"}
TOKENIZE = SHARD | {"tokenize"}
DATA = TOKENIZE | {"data.0"}
MODEL = TOKENIZE | {"model"}
PLAN = {"plan"}
NAME = {"plan", "report"}
NOTHING: set[str] = set()

# Every key, another value for it than the default, and the parts that get another digest by it: this table is the
# surface of the config. A key that goes breaks users' files; a key that begins to change a digest reruns their stages.
EFFECTS: dict[str, tuple[Any, set[str]]] = {
    "experiment": ("other", NAME),
    "model(tiny).tokenizer": ("tokenizers/other", NOTHING),
    "model(tiny).vocab_tokens": (4096, MODEL),
    "model(tiny).hidden_size": (256, MODEL),
    "model(tiny).layers": (2, MODEL),
    "model(tiny).heads": (8, MODEL),
    "model(tiny).seed": (1, MODEL),
    "model(tiny).rope": ({"type": "yarn", "factor": 4.0}, TRAIN),
    "model(local).path": ("models/moved", NOTHING),
    "model(local).rope": ({"type": "yarn", "factor": 4.0}, TRAIN),
    "model(huggingface).name": ("Qwen/Qwen3-4B", MODEL),
    "model(huggingface).revision": ("b" * 40, MODEL),
    "model(huggingface).rope": ({"type": "yarn", "factor": 4.0}, TRAIN),
    "data.train(pydoc).weight": (0.5, SHARD),
    "data.train(pydoc).max_rows": (100, DATA),
    "data.train(file).weight": (2.0, SHARD),
    "data.train(file).format": ("alpaca", TOKENIZE),
    "data.train(file).columns": ({"output": "answer"}, TOKENIZE),
    "data.train(file).roles": ({"bot": "assistant"}, TOKENIZE),
    "data.train(file).max_rows": (10, TOKENIZE),
    "data.train(file).path": ("moved/*.jsonl", NOTHING),
    "data.train(file).split": ("test", NOTHING),
    "data.train(huggingface).weight": (2.0, SHARD),
    "data.train(huggingface).format": ("text", TOKENIZE),
    "data.train(huggingface).columns": ({"text": "body"}, TOKENIZE),
    "data.train(huggingface).roles": ({"bot": "assistant"}, TOKENIZE),
    "data.train(huggingface).max_rows": (10, TOKENIZE),
    "data.train(huggingface).name": ("owner/other", DATA),
    "data.train(huggingface).revision": ("b" * 40, DATA),
    "data.train(huggingface).subset": ("zh", DATA),
    "data.train(huggingface).split": ("train_sft", DATA),
    "data.train(huggingface).files": (["data/*.parquet"], DATA),
    "data.validation_fraction": (0.1, SHARD),
    "tokenize.max_tokens": (64, TOKENIZE),
    "tokenize.over_long": ("truncate", TOKENIZE),
    "tokenize.thinking": ("mask", TOKENIZE),
    "tokenize.prompt_thinking": ("on", TOKENIZE),
    "tokenize.chat_template_kwargs": ({"reasoning_effort": "low"}, TOKENIZE),
    "tokenize.train_on": ("last_assistant", TOKENIZE),
    "tokenize.system": ("Be brief.", TOKENIZE),
    "tokenize.tools": ([{"type": "function", "function": {"name": "clock"}}], TOKENIZE),
    "tokenize.duplicates": ("drop", TOKENIZE),
    "tokenize.near_duplicates": (0.9, TOKENIZE),
    "tokenize.max_dropped_fraction": (0.5, TOKENIZE),
    "tokenize.max_quarantined_fraction": (0.5, TOKENIZE),
    "shard.block_tokens": (2048, SHARD),
    "shard.shards": (2, SHARD),
    "shard.seed": (1, SHARD),
    "cluster.nodes": (2, PLAN),
    "cluster.gpus_per_node": (8, PLAN),
    "cluster.gpu": ("h200", PLAN),
    "cluster.gpu_hour_price": (2.5, PLAN),
    "cluster.internode_gbit_s": (9.0, PLAN),
    "cluster.intranode_gbyte_s": (100.0, PLAN),
    "cluster.measured": ("cluster.json", NOTHING),
    "cluster.cpu_ranks": (4, PLAN),
    "cluster.launcher": ("srun", PLAN),
    "cluster.cpus_per_rank": (4, PLAN),
    "cluster.memory_gb": (64, PLAN),
    "cluster.runtime_minutes": (10, PLAN),
    "cluster.max_requeues": (3, PLAN),
    "train.strategy": ("fsdp", PLAN),
    "train.shard_ranks": (2, PLAN),
    "train.context_ranks": (2, PLAN),
    "train.unit_layers": (2, PLAN),
    "train.offload": ("optimizer", PLAN),
    "train.activation_checkpointing": ("full", PLAN),
    "train.offload_activations": (False, PLAN),
    "train.kept_attention_layers": (0, PLAN),
    "train.reshard_after_forward": (False, PLAN),
    "train.compile": (True, PLAN),
    "train.attention": ("flash", PLAN),
    "train.deepspeed_json": ("zero.json", PLAN),
    "train.micro_batch_blocks": (2, PLAN),
    "train.save_every_steps": (5, PLAN),
    "train.save_async": (False, PLAN),
    "train.keep_last": (5, PLAN),
    "train.timeout_s": (60, PLAN),
    "train.start_timeout_s": (60, PLAN),
    "train.sample_every_steps": (5, PLAN),
    "train.profile_every_steps": (5, PLAN),
    "train.deterministic": (True, PLAN),
    "train.method": ("full", TRAIN),
    "train.precision": ("fp32", TRAIN),
    "train.optimizer": ("adamw_8bit", TRAIN),
    "train.gradient_compression": ("powersgd", TRAIN),
    "train.powersgd_rank": (2, TRAIN),
    "train.local_sgd_steps": (4, TRAIN),
    "train.global_batch_tokens": (131072, TRAIN),
    "train.global_batch_samples": (64, TRAIN),
    "train.epochs": (0.5, TRAIN),
    "train.max_steps": (100, TRAIN),
    "train.until_step": (10, TRAIN),
    "train.lr": (1e-4, TRAIN),
    "train.lr_schedule": ("linear", TRAIN),
    "train.warmup_fraction": (0.1, TRAIN),
    "train.warmup_steps": (10, TRAIN),
    "train.decay_fraction": (0.2, TRAIN),
    "train.min_lr_fraction": (0.1, TRAIN),
    "train.weight_decay": (0.0, TRAIN),
    "train.beta1": (0.8, TRAIN),
    "train.beta2": (0.9, TRAIN),
    "train.adam_eps": (1e-6, TRAIN),
    "train.max_grad_norm": (0.5, TRAIN),
    "train.freeze": (["model.embed_tokens.*"], TRAIN),
    "train.router_aux_loss": (0.0, TRAIN),
    "train.validate_every_steps": (10, TRAIN),
    "train.early_stop_validations": (3, TRAIN),
    "train.keep_best": (True, TRAIN),
    "train.guards.spike_deviations": (10.0, TRAIN),
    "train.guards.window_steps": (32, TRAIN),
    "train.guards.max_skips": (5, TRAIN),
    "train.guards.rollback_every_steps": (50, TRAIN),
    "train.seed": (1, TRAIN),
    "train.replica": ("b", TRAIN),
    "train.lora.rank": (8, TRAIN),
    "train.lora.alpha": (16, TRAIN),
    "train.lora.dropout": (0.1, TRAIN),
    "train.lora.targets": (["q_proj"], TRAIN),
    "train.lora.rslora": (True, TRAIN),
    "train.lora.dora": (True, TRAIN),
    "train.lora.base": ("nf4", TRAIN),
    "train.lora.lr_ratio": (16.0, TRAIN),
    "tracking.to": (["tensorboard"], PLAN),
    "tracking.project": ("other", PLAN),
    "merge.dtype": ("fp32", MERGE),
    "merge.base": ("original", MERGE),
    "evaluate.prompts": (["Who are you?"], EVALUATE),
    "evaluate.generations": (2, EVALUATE),
    "evaluate.max_new_tokens": (8, EVALUATE),
}
CONTENT = Content(model={"config.json": "0" * 64}, data=({"rows.jsonl": "1" * 64},))


def compiled(config: dict[str, Any], content: Content = CONTENT) -> Experiment:
    return compile_config(Config.model_validate_json(json.dumps(config)), content)


def digests(experiment: Experiment) -> dict[str, str]:
    return {part: spec.digest for part, spec in experiment.specs.items()}


def changed(one: Experiment, other: Experiment) -> set[str]:
    before, after = digests(one), digests(other)
    return {part for part in before.keys() | after.keys() if before.get(part) != after.get(part)}


def test_the_table_has_every_key_of_the_schema() -> None:
    assert list(EFFECTS) == [key for key in all_keys() if not key.endswith(".source")]


@pytest.mark.parametrize("key", EFFECTS)
def test_a_key_changes_what_it_decides_and_all_that_is_made_from_that(key: str) -> None:
    value, affected = EFFECTS[key]

    assert changed(compiled(base_of(key)), compiled(with_value(key, value))) == affected


def test_what_was_measured_is_part_of_the_plan_and_where_it_lies_is_not() -> None:
    rates, others = ({"rates": {"copy_bytes_s": {"value": value}}} for value in (1e9, 2e9))
    base = compiled(TINY, Content(CONTENT.model, CONTENT.data, rates))

    assert changed(compiled(TINY), base) == PLAN
    assert changed(base, compiled(TINY, Content(CONTENT.model, CONTENT.data, others))) == PLAN
    assert base.specs["plan"].settings["measured"] == rates


def test_the_plan_is_told_what_auto_has_to_leave_as_it_is() -> None:
    """Also where the value given is the default: without it the plan would choose another."""
    free, held = ({"strategy": "auto", **given} for given in ({}, {"micro_batch_blocks": 1, "recompute": "full"}))
    plans = [compiled({**TINY, "train": train}).specs["plan"] for train in (free, held)]

    as_free = compiled({**TINY, "train": {"strategy": "auto", "recompute": "auto"}}).specs["plan"]

    assert [plan.settings["held"] for plan in plans] == [[], ["micro_batch_blocks", "recompute"]]
    assert as_free.digest == plans[0].digest
    assert plans[0].digest != plans[1].digest
    assert "held" not in compiled(with_value("train.micro_batch_blocks", 2)).specs["plan"].settings


def test_what_says_only_where_and_how_often_decides_the_plan_alone() -> None:
    in_table = {key for key, (_, affected) in EFFECTS.items() if affected == PLAN}

    whole = {key for key in EFFECTS if key.startswith(("cluster.", "tracking."))} - {"cluster.measured"}
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
    two: dict[str, Any] = {**TINY, "data": {"train": [{"source": "pydoc"}, {"source": "pydoc", "max_rows": 9}]}}
    content = Content(CONTENT.model, CONTENT.data * 2)

    assert changed(compiled(TINY), compiled(two, content)) == TOKENIZE | {"data.1"}


def test_a_run_keeps_its_working_directory_wherever_it_is_told_to_stop() -> None:
    runs = {run_digest(compiled(with_value("train.until_step", step)).specs["train"]) for step in (None, 10, 20)}

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
    save_every_steps: 100

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
    model, rows = Repository("huggingface", "model", "o/m"), Repository("modelscope", "dataset", "o/d")
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
    assert specs["model"].settings == {"kind": "model", "source": "huggingface", "name": "o/m", "revision": "1" * 40}
    assert specs["data.0"].settings["revision"] == "2" * 40


def test_a_commit_asks_no_hub(tmp_path: Path) -> None:
    config = Config.model_validate_json(json.dumps(HUB))
    path = tmp_path / "revisions.json"

    assert pinned(config, Revisions(path)) == config
    assert not path.exists()


def test_the_context_of_prompts_is_part_of_the_evaluation_and_of_nothing_without_prompts() -> None:
    sections = {"experiment": "x", "model": {"source": "tiny"}, "data": {"train": [{"source": "pydoc"}]}}
    contexts = []
    for prompts in ([], ["Who are you?"]):
        asked_with = {"system": "You are one.", "chat_template_kwargs": {"reasoning_effort": "low"}}
        given = {**sections, "tokenize": {**asked_with, "thinking": "mask"}, "evaluate": {"prompts": prompts}}
        config = Config.model_validate_json(json.dumps(given))
        found = compile_config(config, Content(dict(RUNNING_PYTHON), (dict(RUNNING_PYTHON),))).specs["evaluate"]
        contexts.append(found.settings.get("context"))
    assert contexts == [None, asked_with]


def test_the_digests_of_a_config_never_change() -> None:
    """All that users have computed hangs on them; a stage version that is bumped on purpose changes them here."""
    assert digests(compiled(TINY)) == {
        "model": "2ee978dff2974324",
        "data.0": "dceee265e3fe3e37",
        "tokenize": "5163851f986d89e0",
        "shard": "d7abeb47a98ddeb9",
        "plan": "5f00d0b1ef5fa2c0",
        "train": "818e22097ac316e5",
        "merge": "a9a7eca60a373306",
        "evaluate": "e7428d3e7a978b13",
        "report": "b74fa917905ee7dd",
    }
