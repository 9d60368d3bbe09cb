"""`qwen3 import`: files of other tools become a config that `check` takes.

All their keys are accounted for.
"""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from pipeline_lib.config import strict_yaml
from pipeline_lib.config.import_draft import OFF, AccountPart
from pipeline_lib.config.importing import Imported
from pipeline_lib.config.load import load_config
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.core.store import Store
from tests.config.imports import config_of, imported, leaves, problems, row_of, write
from tests.processes import running
from tests.stages import ROOT, run_stages_here
from tests.tiny import tiny_model

# What people have, in the forms that the tools' examples and tutorials use.
LORA = """\
### model
model_name_or_path: Qwen/Qwen3-8B
trust_remote_code: true
### method
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
### dataset
dataset: mine
template: qwen3
cutoff_len: 512
max_samples: 1000
overwrite_cache: true
preprocessing_num_workers: 16
### output
output_dir: saves/qwen3-8b/lora/sft
logging_steps: 10
save_steps: 50
plot_loss: true
report_to: none
### train
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
learning_rate: 1e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
"""
ALPACA = {"mine": {"file_name": "mine.json"}}
TUTORIAL = {
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 16},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-5, "betas": [0.9, 0.98], "eps": 1e-7, "weight_decay": 0.1},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": 0,
            "warmup_max_lr": 3e-5,
            "warmup_num_steps": 500,
            "total_num_steps": 4000,
        },
    },
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "reduce_bucket_size": 5e8,
        "contiguous_gradients": True,
    },
    "gradient_clipping": 0.5,
    "train_batch_size": 128,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 4,
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}
AUTO: dict[str, Any] = {
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"),
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "none"},
        "offload_param": {"device": "none"},
        "reduce_bucket_size": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def from_yaml(text: str, info: Any = ALPACA) -> Imported:
    if info is not None:
        write("data/dataset_info.json", info)
    return imported(write("lora.yaml", text))


def all_arguments() -> str:
    """What transformers writes: every argument, most at its default."""
    return str(TrainingArguments(output_dir="out").to_json_string())  # type: ignore[no-untyped-call]


# The whole way.


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PIPELINE_STORE": "store", **environment}
    line = [sys.executable, "-m", "pipeline_lib", *arguments]
    return subprocess.run(line, env=environ, capture_output=True, text=True, check=False)


@pytest.fixture
def local(folder: Path) -> Path:
    """A config made of a YAML that names a model and data in the working directory."""
    shutil.copytree(tiny_model(), folder / "model")
    rows = [
        {"question": f"What is {number}?", "answer": f"It is {number}. " * 5}
        for number in range(100)
    ]
    write("data/mine.json", rows)
    entry = {"file_name": "mine.json", "columns": {"prompt": "question", "response": "answer"}}
    write("data/dataset_info.json", {"mine": entry})
    text = LORA.replace("Qwen/Qwen3-8B", "model").replace("bf16: true", "bf16: true\nuse_cpu: true")
    write(
        "lora.yaml",
        text.replace("gradient_accumulation_steps: 8", "gradient_accumulation_steps: 32"),
    )
    made = command("import", "lora.yaml", "-o", "my.yaml")
    assert (made.returncode, made.stderr) == (0, "")
    assert all(part in made.stdout for part in AccountPart)
    return folder / "my.yaml"


def test_a_yaml_of_llama_factory_with_a_local_model_passes_check(local: Path) -> None:
    checked = command("check", local.name)

    assert (checked.returncode, checked.stderr) == (0, ""), checked
    assert "no problems" in checked.stdout


@pytest.mark.slow
def test_the_rows_of_an_imported_config_are_read(local: Path, folder: Path) -> None:
    store = Store(folder / "store")

    experiment = run_stages_here(local, store, last="tokenize")

    ledger = json.loads((store.sealed(experiment.ref("tokenize")) / "ledger.json").read_text())
    assert sum(source["kept"] for source in ledger["sources"]) == 100


def test_the_config_is_on_stdout_and_the_account_on_stderr() -> None:
    write("data/dataset_info.json", ALPACA)
    write("lora.yaml", LORA)

    done = command("import", "lora.yaml", USE_MODELSCOPE_HUB="1")

    assert done.returncode == 0
    value = strict_yaml.parse(done.stdout, "stdout").value
    assert value["model"] == {"source": "modelscope", "name": "Qwen/Qwen3-8B"}
    assert all(part in done.stderr for part in AccountPart)


def test_the_number_of_gpus_is_an_option_of_the_command() -> None:
    write("ds.json", AUTO)

    assert command("import", "ds.json", "-o", "my.yaml", "--gpus", "4").returncode == 0
    assert strict_yaml.load(Path("my.yaml")).value["cluster"] == {"gpus_per_node": 4}


def test_a_pipe_is_read_as_a_file_is(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    with running(write_whole, folder / "pipe", json.dumps(TUTORIAL)):
        result = imported(Path("pipe"))

    assert config_of(result)["train"]["strategy"] == "zero2"


def write_whole(path: Path, text: str) -> None:
    path.write_text(text)


def test_a_file_that_exists_is_not_replaced() -> None:
    write("ds.json", TUTORIAL)
    write("my.yaml", "mine")

    done = command("import", "ds.json", "-o", "my.yaml")

    assert done.returncode == 2
    assert "my.yaml: 1 problem\n  - exists already" in done.stderr
    assert Path("my.yaml").read_text() == "mine"


def test_the_experiment_is_named_like_the_config_that_is_written() -> None:
    write("ds.json", TUTORIAL)

    assert command("import", "ds.json", "-o", "my.yaml").returncode == 0
    assert strict_yaml.load(Path("my.yaml")).value["experiment"] == "my"


@pytest.mark.parametrize("document", [TUTORIAL, AUTO], ids=["values", "auto"])
def test_of_a_deepspeed_json_check_misses_the_model_and_the_data_alone(document: Any) -> None:
    result = imported(write("ds_config.json", document))
    path = write("my.yaml", result.text)

    with pytest.raises(ConfigError) as raised:
        load_config(path)

    assert raised.value.problems == [
        "model: missing; it has no default",
        "data: missing; it has no default",
    ]
    assert result.missing == ("model", "data")


# Every key is accounted for, once.


@pytest.mark.parametrize(
    "files",
    [
        {"a.yaml": LORA},
        {"a.yaml": LORA + "deepspeed: ds.json\nno_such_key: 1\npacking: true\n", "ds.json": AUTO},
        {"ds.json": TUTORIAL},
        {"args.json": "arguments", "ds.json": AUTO},
    ],
    ids=["yaml", "yaml and json", "json", "arguments and json"],
)
def test_every_key_is_in_exactly_one_part(files: dict[str, Any]) -> None:
    write("data/dataset_info.json", ALPACA)
    expected = Counter[str]()
    paths = []
    for name, content in files.items():
        if content == "arguments":
            content = json.loads(all_arguments())
            expected.update(content.keys())
        elif isinstance(content, str):
            expected.update(strict_yaml.parse(content, name).value.keys())
            expected["mine.file_name"] += 1
        else:
            expected.update(leaves(content))
        paths.append(write(name, content))

    result = imported(*paths)

    counted = Counter(
        one.name for row in result.rows for one in row.keys if "default)" not in one.name
    )
    assert counted == expected


def test_a_key_that_nothing_is_known_about_is_said_with_the_nearest() -> None:
    row = row_of(from_yaml(LORA + "learning_rat: 1\n"), "learning_rat")

    assert row.part == AccountPart.NONE
    assert "unknown to this import; did you mean 'learning_rate'?" in row.why


def test_gpus_that_share_a_sequence_are_said_to_have_a_key_here() -> None:
    result = imported(
        write(
            "ds.json", AUTO | {"sequence_parallel_size": 4, "tensor_parallel": {"autotp_size": 2}}
        )
    )

    assert (
        "the key for it here is train.context_ranks" in row_of(result, "sequence_parallel_size").why
    )
    assert row_of(result, "tensor_parallel.autotp_size").why.endswith("not over tensors or stages")
    off = imported(write("off.json", AUTO | {"sequence_parallel_size": 1}))
    assert row_of(off, "sequence_parallel_size").why == OFF


@pytest.mark.parametrize(
    "key", ["hf_hub_token", "swanlab_api_key", "hub_token", "swanlab_lark_secret"]
)
def test_a_secret_is_nowhere(key: str) -> None:
    result = from_yaml(f"{LORA}{key}: mellon-mellon\n")

    assert "mellon" not in result.text + repr(
        [(row.there, row.here, row.why) for row in result.rows]
    )
    assert row_of(result, key).there == f"{key}: ***"


def test_what_has_no_equivalent_stands_in_the_config_as_a_comment() -> None:
    text = from_yaml(LORA + "quantization_bit: 8\n").text

    changed, without = text.partition("# Not converted:\n")[::2]
    assert (
        "#   - quantization_bit: 8: for a base in 4 bits (QLoRA) set train.lora.base: nf4; "
        in without
    )
    assert "#   - ddp_timeout: 180000000: train.timeout_s stays 300 s" in changed
    assert "resume_from_checkpoint" not in text


# Values, and the defaults that apply there.


def test_the_keys_of_llama_factory_are_ours() -> None:
    config = config_of(from_yaml(LORA))

    assert config["experiment"] == "lora"
    assert config["model"] == {"source": "huggingface", "name": "Qwen/Qwen3-8B"}
    assert config["data"]["train"] == [
        {"source": "file", "path": "data/mine.json", "format": "alpaca", "max_rows": 1000}
    ]
    assert config["tokenize"] == {
        "max_tokens": 512,
        "over_long": "truncate",
        "prompt_thinking": "on",
    }
    assert config["shard"] == {"block_tokens": 512}
    assert config["cluster"] == {"gpus_per_node": 1}
    assert config["train"] == {
        "save_every_steps": 50,
        "method": "lora",
        "precision": "bf16",
        "global_batch_samples": 16,
        "epochs": 3,
        "lr": 1e-4,
        "lr_schedule": "cosine",
        "warmup_fraction": 0.1,
        "weight_decay": 0,
        "beta2": 0.999,
        "lora": {"rank": 8, "alpha": 16, "targets": "all-linear"},
    }


def test_what_llama_factory_takes_by_default_is_written_out() -> None:
    config = config_of(
        from_yaml("model_name_or_path: Qwen/Qwen3-8B\ndataset: mine\nlora_rank: 4\n")
    )

    assert config["tokenize"] == {"max_tokens": 2048, "over_long": "truncate"}
    # as there, where nothing is held out by default
    assert config["data"]["validation_fraction"] == 0
    train = config["train"]
    assert train["lora"] == {"rank": 4, "alpha": 8}
    assert (train["method"], train["lr"], train["epochs"], train["lr_schedule"]) == (
        "lora",
        5e-5,
        3,
        "linear",
    )
    assert (train["weight_decay"], train["beta2"], train["warmup_fraction"]) == (0, 0.999, 0)
    assert train["global_batch_samples"] == 8


def test_our_table_of_the_trainers_defaults_is_that_of_transformers() -> None:
    """A file that gives one default means the same as one that gives all of them."""
    every = write("every.json", all_arguments())
    one = write("one.json", {"output_dir": "out", "learning_rate": 5e-5})

    first, second = (
        load_config(write(f"{path.stem}.yaml", with_sources(imported(path))))
        for path in (every, one)
    )

    # no two programs draw alike; what is saved changes no result
    left_out = {"seed", "save_every_steps"}
    assert first.train.model_dump(exclude=left_out) == second.train.model_dump(exclude=left_out)


def with_sources(result: Imported) -> str:
    return f"{result.text}model: {{source: tiny}}\ndata: {{train: [{{source: pydoc}}]}}\n"


@pytest.mark.parametrize(
    ("lines", "train"),
    [
        ("lora_alpha: 32", {"lora": {"alpha": 32}}),
        ("lora_alpha: null", {"lora": {"alpha": 16}}),
        ("quantization_bit: 4", {"lora": {"base": "nf4"}}),
        ("lora_target: q_proj, v_proj", {"lora": {"targets": ["q_proj", "v_proj"]}}),
        (
            "use_rslora: true\nuse_dora: yes\nloraplus_lr_ratio: 16",
            {"lora": {"rslora": True, "dora": True}},
        ),
        ("max_steps: 700", {"max_steps": 700}),
        ("warmup_steps: 500", {"warmup_steps": 500}),
        ("warmup_steps: 0.2", {"warmup_fraction": 0.2}),
        ("adam_epsilon: '1e-6'\nadam_beta1: 0.8", {"adam_eps": 1e-6, "beta1": 0.8}),
        ("max_grad_norm: 0", {"max_grad_norm": 1e9}),
        ("optim: paged_adamw_8bit", {"optimizer": "adamw_8bit"}),
        ("finetuning_type: full\nuse_muon: true", {"optimizer": "muon"}),
        ("finetuning_type: full\nuse_muon: true\ndeepspeed: null", {"optimizer": "muon"}),
        ("finetuning_type: full\noptim: muon", {"optimizer": "muon"}),
        ("use_muon: true", {"optimizer": "adamw"}),  # with adapters
        ("use_muon: false", {}),
        ("val_size: 0.1\neval_strategy: steps\neval_steps: 40", {"validate_every_steps": 40}),
        ("val_size: 0.1\neval_strategy: epoch", {"validate_every_steps": "epoch"}),
        ("save_strategy: epoch", {"save_every_steps": "epoch"}),
        ("packing: true", {"global_batch_tokens": 16 * 512}),
        ("ray_num_workers: 4", {"global_batch_samples": 64}),
        ("fsdp: full_shard auto_wrap offload", {"strategy": "fsdp", "offload": "optimizer+params"}),
    ],
)
def test_values_of_llama_factory(lines: str, train: dict[str, Any]) -> None:
    given = [line.partition(":")[0] for line in lines.splitlines()]
    base = "\n".join(line for line in LORA.splitlines() if line.partition(":")[0] not in given)
    base = base.replace("warmup_ratio: 0.1\n", "") if "warmup" in lines else base

    config = config_of(from_yaml(f"{base}\n{lines}\n"))["train"]

    for key, value in train.items():
        if key == "lora":
            assert config["lora"].items() >= value.items()
        else:
            assert config[key] == value
    assert ("epochs" in config) == ("max_steps" not in config)
    assert len({"global_batch_samples", "global_batch_tokens"} & set(config)) == 1


@pytest.mark.parametrize(
    ("lines", "held_out", "is_validated"),
    [
        ("val_size: 0.1", {"validation_fraction": 0.1}, True),
        ("val_size: 200", {"validation_fraction": 0.05}, True),
        ("", {"validation_fraction": 0}, False),
        (
            "eval_dataset: mine",
            {
                "validation": [
                    {
                        "source": "file",
                        "path": "data/mine.json",
                        "format": "alpaca",
                        "max_rows": 1000,
                    }
                ]
            },
            True,
        ),
    ],
)
def test_what_is_held_out_there_is_held_out_here(
    lines: str, held_out: dict[str, Any], is_validated: bool
) -> None:
    config = config_of(from_yaml(f"{LORA}{lines}\neval_strategy: epoch\n"))

    assert {key: value for key, value in config["data"].items() if key != "train"} == held_out
    assert ("validate_every_steps" in config["train"]) == is_validated


ALPACA_ROW = {"instruction": "Say hello.", "output": "Hello."}


@pytest.mark.parametrize(
    ("lines", "rows", "share"),
    [
        ("val_size: 100", 400, 0.25),
        ("val_size: 100", 3000, 0.1),  # of the 1000 rows that max_samples takes
        ("val_size: 7", 333, 0.021021),
        ("val_size: 1", 400, 0.0025),
    ],
)
def test_a_number_of_rows_held_out_becomes_their_share_of_the_rows(
    lines: str, rows: int, share: float
) -> None:
    write("data/mine.json", [ALPACA_ROW] * rows)
    result = from_yaml(f"{LORA}{lines}\neval_strategy: epoch\n")

    assert config_of(result)["data"]["validation_fraction"] == share
    row = row_of(result, "val_size")
    assert row.part == AccountPart.CHANGED
    assert f"{lines.partition(': ')[2]} of the {min(rows, 1000):,} rows" in row.why
    assert "rows that the files have now" in result.text


def test_the_rows_of_several_files_and_sets_count_together() -> None:
    write("data/one/a.jsonl", "".join(json.dumps(ALPACA_ROW) + "\n" for _ in range(30)))
    write("data/one/b.jsonl", "".join(json.dumps(ALPACA_ROW) + "\n" for _ in range(20)))
    write("data/two.json", [ALPACA_ROW] * 50)
    entries = {"one": {"file_name": "one"}, "two": {"file_name": "two.json", "num_samples": 10}}
    result = from_yaml(
        f"{LORA.replace('dataset: mine', 'dataset: one, two')}val_size: 15\n", entries
    )

    assert config_of(result)["data"]["validation_fraction"] == 0.25


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        (ALPACA, "no file matches 'data/mine.json'"),
        ({"mine": {"hf_hub_url": "a/b"}}, "a/b is on huggingface"),
        (None, "the data sets are not found"),
    ],
    ids=["missing", "hub", "unnamed"],
)
def test_where_the_rows_are_not_known_the_share_that_is_taken_is_named_with_the_reason(
    entries: dict[str, Any] | None, reason: str
) -> None:
    result = from_yaml(f"{LORA}val_size: 100\n", entries)

    assert config_of(result)["data"]["validation_fraction"] == 0.05
    row = row_of(result, "val_size")
    assert row.part == AccountPart.CHANGED
    assert reason in row.why
    assert "5% is written, our default: set it to 100 divided by the number of rows" in row.why


def test_more_rows_held_out_than_there_are_is_a_problem() -> None:
    write("data/mine.json", [ALPACA_ROW] * 100)
    with pytest.raises(
        ConfigError, match="val_size: 100 rows, and the data have 100; none would be left"
    ):
        from_yaml(f"{LORA}val_size: 100\n")


def test_a_share_and_a_data_set_of_its_own_are_not_both_held_out() -> None:
    with pytest.raises(ConfigError, match="val_size and eval_dataset: both say what is held out"):
        from_yaml(f"{LORA}val_size: 0.1\neval_dataset: mine\n")


@pytest.mark.parametrize(
    ("template", "line", "tokenize"),
    [
        ("qwen3", "", {"prompt_thinking": "on"}),
        ("qwen3", "enable_thinking: true", {"prompt_thinking": "on"}),
        ("qwen3", "enable_thinking: false", {"thinking": "strip"}),
        ("qwen3", "enable_thinking: null", {}),
        ("qwen3_5", "", {}),
        ("qwen3_6", "enable_thinking: true", {}),
        ("qwen3_5", "enable_thinking: false", {"thinking": "strip"}),
        ("qwen3_nothink", "", {}),
        (
            "qwen3_nothink",
            "mask_history: true\ndefault_system: Be brief.",
            {"train_on": "last_assistant"},
        ),
    ],
)
def test_thinking_is_trained_as_there(template: str, line: str, tokenize: dict[str, str]) -> None:
    config = config_of(
        from_yaml(f"{LORA.replace('template: qwen3', f'template: {template}')}{line}\n")
    )["tokenize"]

    assert config == {"max_tokens": 512, "over_long": "truncate", **tokenize} | (
        {"system": "Be brief."} if "system" in line else {}
    )


def test_raw_text_is_cut_into_pieces_as_there() -> None:
    text = LORA.replace("stage: sft", "stage: pt")

    config = config_of(
        from_yaml(text, {"mine": {"file_name": "mine.jsonl", "columns": {"prompt": "body"}}})
    )

    assert config["tokenize"]["over_long"] == "split"
    assert config["data"]["train"][0] == {
        "source": "file",
        "path": "data/mine.jsonl",
        "format": "text",
        "columns": {"text": "body"},
        "max_rows": 1000,
    }
    assert config["train"]["global_batch_tokens"] == 16 * 512


def test_a_deepspeed_json_becomes_our_keys() -> None:
    result = imported(write("ds.json", TUTORIAL))

    assert config_of(result)["cluster"] == {"gpus_per_node": 8}
    assert config_of(result)["train"] == {
        "strategy": "zero2",
        "offload": "optimizer",
        "precision": "bf16",
        "optimizer": "adamw",
        "global_batch_samples": 128,
        "max_steps": 4000,
        "lr": 3e-5,
        "lr_schedule": "linear",
        "warmup_steps": 500,
        "weight_decay": 0.1,
        "beta1": 0.9,
        "beta2": 0.98,
        "adam_eps": 1e-7,
        "max_grad_norm": 0.5,
    }
    assert row_of(result, "zero_optimization.overlap_comm").part == AccountPart.NONE
    assert "warmup_type (DeepSpeed's default): log" in result.text + repr(
        [row.there for row in result.rows]
    )


def test_a_deepspeed_json_without_precision_is_fp32_and_with_few_values_takes_deepspeeds_defaults() -> (
    None
):
    document = {"optimizer": {"type": "Adam", "params": {"lr": 1e-4}}, "train_batch_size": 32}

    train = config_of(imported(write("ds.json", document)))["train"]

    assert (train["precision"], train["beta2"], train["weight_decay"]) == ("fp32", 0.999, 0)
    assert train["global_batch_samples"] == 32


def test_auto_is_what_the_arguments_of_the_other_file_say() -> None:
    arguments = {
        "output_dir": "x",
        "learning_rate": 2e-5,
        "per_device_train_batch_size": 3,
        "fp16": True,
    }
    paths = write("args.json", arguments), write("ds.json", AUTO)

    result = imported(*paths)

    train = config_of(result)["train"]
    assert (train["strategy"], train["lr"], train["precision"]) == ("zero3", 2e-5, "fp16")
    assert train["global_batch_samples"] == 3
    assert row_of(result, "optimizer.params.lr") == row_of(result, "learning_rate")


@pytest.mark.parametrize(
    "place", ["ds/z3.json", "examples/ds/z3.json", "examples/train/ds/z3.json"]
)
def test_the_json_that_a_yaml_names_is_read(place: str) -> None:
    write(place, AUTO)
    write("data/dataset_info.json", ALPACA)
    path = write("examples/train/full.yaml", LORA + "deepspeed: ds/z3.json\n")

    assert config_of(imported(path))["train"]["strategy"] == "zero3"


def test_a_json_that_is_not_here_is_said() -> None:
    result = from_yaml(LORA + "deepspeed: ds/z3.json\n")

    assert row_of(result, "deepspeed").part == AccountPart.NONE
    assert "strategy" not in config_of(result)["train"]


# Data sets.


@pytest.mark.parametrize(
    ("entry", "source"),
    [
        (
            {"hf_hub_url": "o/rows", "ms_hub_url": "m/rows", "subset": "zh", "split": "test"},
            {
                "source": "huggingface",
                "name": "o/rows",
                "subset": "zh",
                "split": "test",
                "format": "alpaca",
            },
        ),
        ({"ms_hub_url": "m/rows"}, {"source": "modelscope", "name": "m/rows", "format": "alpaca"}),
        (
            {
                "file_name": "x.jsonl",
                "formatting": "sharegpt",
                "columns": {"messages": "conversations"},
            },
            {"source": "file", "path": "data/x.jsonl", "format": "sharegpt"},
        ),
        (
            {
                "file_name": "x.jsonl",
                "formatting": "sharegpt",
                "columns": {"messages": "turns", "system": "sys", "tools": "tools"},
                "tags": {
                    "role_tag": "role",
                    "content_tag": "text",
                    "user_tag": "customer",
                    "assistant_tag": "gpt",
                },
            },
            {
                "source": "file",
                "path": "data/x.jsonl",
                "format": "sharegpt",
                "columns": {
                    "conversations": "turns",
                    "system": "sys",
                    "from": "role",
                    "value": "text",
                },
                "roles": {"customer": "user"},
            },
        ),
        (
            {
                "file_name": "x.jsonl",
                "formatting": "openai",
                "columns": {"messages": "dialog"},
                "num_samples": 20,
            },
            {
                "source": "file",
                "path": "data/x.jsonl",
                "format": "messages",
                "columns": {"messages": "dialog"},
                "max_rows": 20,
            },
        ),
        (
            {"file_name": "x[1].jsonl"},
            {"source": "file", "path": "data/x[[]1].jsonl", "format": "alpaca"},
        ),
        (
            {"file_name": "parts"},
            {"source": "file", "path": "data/parts/*.jsonl", "format": "alpaca"},
        ),
        ({"script_url": "code"}, {"source": "file", "path": "data/mine.jsonl", "format": "alpaca"}),
    ],
)
def test_entries_of_dataset_info(entry: dict[str, Any], source: dict[str, Any]) -> None:
    write("data/parts/a.jsonl", "")
    result = from_yaml(
        LORA.replace("max_samples: 1000\n", ""), {"mine": entry, "other": {"file_name": "o.json"}}
    )

    assert config_of(result)["data"]["train"] == [source]
    names = Counter(one.name for row in result.rows for one in row.keys)
    assert all(names[f"mine.{key}"] == 1 for key in leaves(entry))
    assert names["other"] == 1


def test_rows_of_a_layout_with_other_names_are_read_as_there() -> None:
    """What `columns` and `roles` say is what the reader of rows understands."""
    from pipeline_lib.data.layouts import Layout, to_content

    entry = {
        "file_name": "x.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "turns"},
        "tags": {
            "role_tag": "who",
            "content_tag": "says",
            "user_tag": "u",
            "assistant_tag": "a",
            "system_tag": "s",
        },
    }
    source = config_of(from_yaml(LORA, {"mine": entry}))["data"]["train"][0]
    row = {
        "turns": [
            {"who": "s", "says": "Be kind."},
            {"who": "u", "says": "Hi"},
            {"who": "a", "says": "Hello"},
        ]
    }

    content: Any = to_content(row, Layout(source["format"], source["columns"], source["roles"]))

    assert [message["role"] for message in content.messages] == ["system", "user", "assistant"]


def test_a_given_dataset_info_is_read_from_its_own_folder() -> None:
    info = write("elsewhere/info.json", ALPACA)
    path = write("lora.yaml", LORA)

    assert config_of(imported(path, info))["data"]["train"][0]["path"] == "elsewhere/mine.json"


def test_without_a_dataset_info_the_data_alone_are_missing() -> None:
    result = from_yaml(LORA, None)

    assert result.missing == ("data",)
    assert row_of(result, "dataset").part == AccountPart.NONE


# What is refused.


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1\n", "not YAML"),
        ('{"a": 1,}', "not JSON: line 1"),
        ('{"a": 1, "a": 2}', "a: given twice"),
        ("- 1\n", "holds no keys with values"),
        ("", "holds no keys with values"),
        ("a: &x 1\n", "anchors and aliases"),
        ("hello: 1\n", "unknown kind of file (it has the keys hello)"),
        ("experiment: x\nmodel: {source: tiny}\n", "a config of this project already"),
        (
            '{"peft_type": "LORA", "r": 8, "target_modules": []}',
            "looks like peft's config of an adapter",
        ),
        ('{"mine": {"file_name": "x.json"}}', "dataset_info.json lists data sets only"),
    ],
)
def test_a_file_that_is_no_import_is_refused(text: str, said: str) -> None:
    [problem] = problems(write("file", text))

    assert problem.startswith("file: ") or said.startswith("dataset_info")
    assert said in problem


def test_files_that_cannot_be_read_are_all_named(folder: Path) -> None:
    Path("binary").write_bytes(b"\xff\xfe\0")
    Path("large").write_text("a: 1\n" * 100_000)

    found = problems(folder, Path("none.yaml"), Path("binary"), Path("large"))

    assert [problem.partition(": ")[0] for problem in found] == [
        str(folder),
        "none.yaml",
        "binary",
        "large",
    ]
    assert found[0].endswith("is a folder; name the YAML or JSON file in it")
    assert "No such file" in found[1]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("stage: dpo", "stage: dpo: preference and reward training do not exist here"),
        ("finetuning_type: oft", "finetuning_type: oft does not exist here"),
        ("learning_rate: much", "learning_rate: much is not a number up to 1e+15"),
        ("learning_rate: -1", "train.lr: -1 should be greater than 0"),
        ("cutoff_len: 12.5", "cutoff_len: 12.5 is not a whole number"),
        ("bf16: maybe", "bf16: maybe is not true or false"),
        ("lora_target: c_attn", "lora_target: c_attn: not linear modules of a Qwen3 layer"),
        ("gradient_accumulation_steps: 0", "the batch: its numbers have to be at least 1"),
        ("dataset: mien", "dataset: mien is not in data/dataset_info.json; did you mean 'mine'?"),
        ("fp16: true", "bf16 and fp16: both are true"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_its_key(lines: str, said: str) -> None:
    write("data/dataset_info.json", ALPACA)
    given = lines.partition(":")[0]
    base = "\n".join(line for line in LORA.splitlines() if line.partition(":")[0] != given)

    found = problems(write("lora.yaml", f"{base}\n{lines}\n"))

    assert any(said in problem for problem in found), found
    assert any(given in problem for problem in found) or "batch" in said


def test_preference_data_are_refused() -> None:
    write("data/dataset_info.json", {"mine": {"file_name": "x.json", "ranking": True}})

    assert problems(write("lora.yaml", LORA)) == [
        "data/dataset_info.json: mine: preference data; take a data set of examples to follow"
    ]


def test_files_that_contradict_each_other_are_refused_with_both_keys() -> None:
    arguments = write("args.json", {"output_dir": "x", "learning_rate": 2e-5})

    [problem] = problems(arguments, write("ds.json", {**TUTORIAL, "scheduler": {}}))

    assert problem == (
        "ds.json: optimizer.params.lr: 3e-05: contradicts args.json: learning_rate: 2e-05; correct "
        "one of the files"
    )


def test_a_batch_that_no_number_of_gpus_makes_is_refused() -> None:
    [problem] = problems(write("ds.json", {**TUTORIAL, "train_batch_size": 100}))

    assert problem.startswith("train_batch_size 100 is not 4 x 4 x a whole number of GPUs")


def test_two_files_of_one_kind_are_refused() -> None:
    found = problems(write("a.json", TUTORIAL), write("b.json", AUTO))

    assert found == [
        "a.json and b.json are both of the kind DeepSpeed; import one of them at a time"
    ]
