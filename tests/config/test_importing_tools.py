"""`qwen3 import` of Axolotl, ms-swift, TRL and accelerate: their files, and their commands."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.config import strict_yaml
from pipeline_lib.config.import_draft import AccountPart
from pipeline_lib.config.load import load_config
from tests.config.imports import config_of, imported, problems, row_of, write

AXOLOTL_QLORA = """\
base_model: Qwen/Qwen3-8B
plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]
strict: false
chat_template: qwen3
datasets:
  - path: mlabonne/FineTome-100k
    type: chat_template
    split: train[:20%]
    field_messages: turns
    message_property_mappings: {role: from, content: value}
    roles: {user: [human, customer], assistant: [gpt]}
  - {path: rows.jsonl, ds_type: json, type: alpaca}
  - {path: json, data_files: [texts.jsonl, more.jsonl], type: completion, field: body}
val_set_size: 0.05
output_dir: ./outputs/out
dataset_prepared_path: last_run_prepared
sequence_len: 2048
sample_packing: true
pad_to_sequence_len: true
load_in_4bit: true
adapter: qlora
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_modules: [q_proj, k_proj, v_proj]
lora_mlp_kernel: true
wandb_project:
wandb_entity:
gradient_accumulation_steps: 2
micro_batch_size: 1
num_epochs: 1
optimizer: paged_adamw_8bit
lr_scheduler: cosine
learning_rate: 0.0002
train_on_inputs: false
group_by_length: false
bf16: auto
tf32: true
gradient_checkpointing: offload
flash_attention: true
warmup_steps: 10
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.0
special_tokens: {pad_token: x}
no_such_key: 1
"""
AXOLOTL_FSDP = """\
base_model: Qwen/Qwen3-14B
datasets:
  - {path: tatsu-lab/alpaca, type: alpaca}
val_set_size: 0
sequence_len: 4096
sample_packing: false
wandb_project: mine
wandb_name: run-1
gradient_accumulation_steps: 4
micro_batch_size: 2
max_steps: 300
optimizer: adamw_torch_fused
learning_rate: 2e-5
bf16: true
fsdp: [full_shard, auto_wrap]
fsdp_config:
  fsdp_version: 2
  fsdp_offload_params: true
  fsdp_cpu_ram_efficient_loading: true
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_reshard_after_forward: true
"""
SWIFT = """\
# 22 GB
nproc_per_node=2
CUDA_VISIBLE_DEVICES=0,1 \\
NPROC_PER_NODE=$nproc_per_node \\
swift sft \\
    --model Qwen/Qwen3-8B --train_type lora \\
    --dataset 'AI-ModelScope/alpaca-gpt4-data-zh#500' hf::o/rows:zh 'swift/self-cognition#500' \\
    --torch_dtype bfloat16 --num_train_epochs 1 --per_device_train_batch_size 1 \\
    --lora_rank 8 --lora_alpha 32 --target_modules all-linear \\
    --save_steps 50 --eval_steps 50 --split_dataset_ratio 0.01 --max_length 2048 \\
    --system 'You are a helpful assistant.' --warmup_ratio 0.05 \\
    --output_dir output --model_author swift --model_name 'a robot' 2>&1 | tee log.txt
"""
SWIFT_FULL = """\
model: Qwen/Qwen3-8B
tuner_type: full
dataset: [rows.jsonl]
val_dataset: [held-out.jsonl]
torch_dtype: bfloat16
per_device_train_batch_size: 2
packing: true
attn_impl: flash_attn
deepspeed: zero3_offload
max_length: 8192
truncation_strategy: right
loss_scale: last_round
use_hf: true
save_strategy: epoch
"""
TRL_QLORA = """\
model_name_or_path: Qwen/Qwen3-4B
dtype: bfloat16
attn_implementation: flash_attention_2
use_peft: true
lora_r: 32
lora_alpha: 16
load_in_4bit: true
dataset_name: trl-lib/Capybara
learning_rate: 2.0e-4
num_train_epochs: 1
packing: true
max_length: 2048
assistant_only_loss: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
eos_token: x
eval_strategy: steps
eval_steps: 100
lr_scheduler_type: cosine
warmup_steps: 0.03
report_to: wandb
push_to_hub: true
"""
TRL_COMMAND = """\
accelerate launch --config_file zero3.yaml --num_processes 4 trl/scripts/sft.py \\
    --model_name_or_path Qwen/Qwen3-4B --dataset_name trl-lib/Capybara \\
    --learning_rate 2.0e-5 --per_device_train_batch_size 2 --gradient_accumulation_steps 8 \\
    --output_dir out
"""
ZERO3 = """\
compute_environment: LOCAL_MACHINE
debug: false
deepspeed_config:
  deepspeed_multinode_launcher: standard
  offload_optimizer_device: none
  offload_param_device: none
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
distributed_type: DEEPSPEED
downcast_bf16: 'no'
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
use_cpu: false
"""
FSDP2 = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: false
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_version: 2
mixed_precision: fp16
num_machines: 1
num_processes: 8
"""
EXAMPLES = {
    "axolotl qlora": {"qlora.yaml": AXOLOTL_QLORA},
    "axolotl fsdp": {"fsdp.yaml": AXOLOTL_FSDP},
    "swift lora": {"swift.sh": SWIFT},
    "swift full": {"swift.yaml": SWIFT_FULL},
    "trl qlora": {"sft.yaml": TRL_QLORA},
    "trl and accelerate": {"sft.yaml": TRL_QLORA, "fsdp2.yaml": FSDP2},
    "trl command": {"sft.sh": TRL_COMMAND, "zero3.yaml": ZERO3},
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the data that the examples name."""
    monkeypatch.chdir(tmp_path)
    for name in ("rows.jsonl", "held-out.jsonl"):
        write(name, '{"instruction": "Say hello.", "output": "Hello."}\n')
    for name in ("texts.jsonl", "more.jsonl"):
        write(name, '{"body": "Hello."}\n')
    return tmp_path


def example(name: str) -> list[Path]:
    return [write(file, text) for file, text in EXAMPLES[name].items()]


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_config_has_no_problems(name: str) -> None:
    result = imported(*example(name))

    assert result.missing == ()
    load_config(write("my.yaml", result.text))


@pytest.mark.parametrize("name", [name for name in EXAMPLES if "command" not in name])
def test_every_key_of_a_file_is_in_exactly_one_row(name: str) -> None:
    result = imported(*example(name))

    counted = Counter(one.name for row in result.rows for one in row.keys)
    for text in EXAMPLES[name].values():
        for key in strict_yaml.parse(text, name).value if text != SWIFT else ():
            rows = [one for one in counted if one == key or one.startswith((f"{key}.", f"{key}["))]
            assert rows, key
            assert all(counted[one] == 1 for one in rows)


@pytest.mark.parametrize("name", EXAMPLES)
def test_no_usual_key_is_unknown(name: str) -> None:
    unknown = [
        one.name
        for row in imported(*example(name)).rows
        for one in row.keys
        if "unknown to this import" in row.why
    ]

    assert unknown == (["no_such_key"] if name == "axolotl qlora" else [])


# Axolotl.


def test_a_qlora_of_axolotl_is_trained_alike() -> None:
    config = config_of(imported(*example("axolotl qlora"), gpus=2))

    assert config["model"] == {"source": "huggingface", "name": "Qwen/Qwen3-8B"}
    assert config["data"] == {
        "train": [
            {
                "source": "huggingface",
                "name": "mlabonne/FineTome-100k",
                "format": "sharegpt",
                "columns": {"conversations": "turns"},
                "roles": {"customer": "user"},
            },
            {"source": "file", "path": "rows.jsonl", "format": "alpaca"},
            {
                "source": "file",
                "path": "texts.jsonl",
                "format": "text",
                "columns": {"text": "body"},
            },
            {
                "source": "file",
                "path": "more.jsonl",
                "format": "text",
                "columns": {"text": "body"},
            },
        ],
        "validation_fraction": 0.05,
    }
    assert config["tokenize"] == {"max_tokens": 2048}  # longer ones are dropped, as here
    assert config["shard"] == {"block_tokens": 2048}
    assert config["cluster"] == {"gpus_per_node": 2}
    assert config["train"] == {
        "save_every_steps": "epoch",
        "method": "lora",
        "precision": "bf16",
        "optimizer": "adamw_8bit",
        "global_batch_tokens": 2 * 1 * 2 * 2048,
        "epochs": 1,
        "lr": 2e-4,
        "lr_schedule": "cosine",
        "warmup_steps": 10,
        "weight_decay": 0,
        "beta2": 0.999,
        "validate_every_steps": "epoch",
        "lora": {
            "rank": 16,
            "alpha": 32,
            "dropout": 0.05,
            "targets": ["q_proj", "k_proj", "v_proj"],
            "base": "nf4",
        },
    }


def test_a_full_fine_tuning_of_axolotl_with_fsdp_is_trained_alike() -> None:
    config = config_of(imported(*example("axolotl fsdp"), gpus=8))

    assert config["experiment"] == "run-1"
    assert config["tracking"] == {"to": ["wandb"], "project": "mine"}
    assert config["data"]["validation_fraction"] == 0
    train = config["train"]
    assert (train["strategy"], train["offload"]) == ("fsdp", "optimizer+params")
    assert (train["global_batch_samples"], train["max_steps"]) == (64, 300)
    # its own default: 3 % of the steps, which is ours, but at most 100
    assert train["warmup_fraction"] == 0.03
    assert "lora" not in train


@pytest.mark.parametrize(
    ("lines", "section", "expected"),
    [
        ("adapter: lora\nlora_target_linear: true", "lora", {"targets": "all-linear"}),
        ("adapter: lora\npeft_use_dora: true", "lora", {"dora": True}),
        ("adapter: lora\nload_in_4bit: true\ndeepspeed: ds.json", "lora", {"base": "unquantized"}),
        ("warmup_ratio: 0.1", "", {"warmup_fraction": 0.1}),
        ("saves_per_epoch: 4", "", {"save_every_steps": "epoch"}),
        ("save_steps: 40", "", {"save_every_steps": 40}),
        ("save_strategy: 'no'", "", {}),
        ("cosine_min_lr_ratio: 0.1", "", {"min_lr_fraction": 0.1}),
        ("fp16: true\nbf16: false", "", {"precision": "fp16"}),
        ("sample_packing: true", "", {"global_batch_tokens": 8 * 512}),
        ("lr_scheduler: linear", "", {"lr_schedule": "linear"}),
    ],
)
def test_values_of_axolotl(lines: str, section: str, expected: dict[str, Any]) -> None:
    write("ds.json", {"zero_optimization": {"stage": 2}})
    text = (
        "base_model: Qwen/Qwen3-8B\nmicro_batch_size: 2\ngradient_accumulation_steps: 4\n"
        "learning_rate: 1e-4\noptimizer: adamw_torch\nlora_r: 4\nlora_alpha: 8\n"
        "datasets: [{path: rows.jsonl, type: alpaca}]\n"
    )

    train = config_of(imported(write("a.yaml", text + lines + "\n")))["train"]

    assert (train[section] if section else train).items() >= expected.items()


def test_an_entry_of_no_known_form_is_named() -> None:
    text = AXOLOTL_FSDP.replace("datasets:", "datasets:\n  - 5\n  - {}")

    result = imported(write("a.yaml", text))

    assert {row_of(result, f"datasets[{number}]").part for number in (0, 1)} == {AccountPart.NONE}


# ms-swift.


def test_a_command_of_swift_is_trained_alike() -> None:
    result = imported(*example("swift lora"))

    config = config_of(result)
    assert config["model"] == {"source": "modelscope", "name": "Qwen/Qwen3-8B"}
    assert config["data"] == {
        "train": [
            {
                "source": "modelscope",
                "name": "AI-ModelScope/alpaca-gpt4-data-zh",
                "max_rows": 500,
            },
            {"source": "huggingface", "name": "o/rows", "subset": "zh"},
            {"source": "modelscope", "name": "swift/self-cognition", "max_rows": 500},
        ],
        "validation_fraction": 0.01,
    }
    assert config["tokenize"] == {"max_tokens": 2048, "system": "You are a helpful assistant."}
    assert config["cluster"] == {"gpus_per_node": 2}
    assert config["train"] == {
        "save_every_steps": 50,
        "method": "lora",
        "global_batch_samples": 16,  # the default of accumulation is 16 divided by the GPUs
        "epochs": 1,
        "lr": 1e-4,
        "warmup_fraction": 0.05,
        "weight_decay": 0.1,
        "validate_every_steps": 50,
        "lora": {"rank": 8, "alpha": 32, "dropout": 0.05, "targets": "all-linear"},
    }
    assert row_of(result, "model_name").part == AccountPart.NONE


def test_a_full_fine_tuning_of_swift_with_its_own_deepspeed_is_trained_alike() -> None:
    config = config_of(imported(*example("swift full"), gpus=4))

    assert config["model"]["source"] == "huggingface"
    assert config["data"]["validation"] == [{"source": "file", "path": "held-out.jsonl"}]
    assert config["tokenize"] == {
        "max_tokens": 8192,
        "over_long": "truncate",
        "train_on": "last_assistant",
    }
    train = config["train"]
    assert (train["strategy"], train["offload"]) == ("zero3", "optimizer+params")
    assert train["global_batch_tokens"] == 2 * 2 * 4 * 8192
    assert (train["save_every_steps"], train["validate_every_steps"]) == ("epoch", "epoch")
    # without adapters 1e-5 there, as by default here
    assert load_config(write("my.yaml", imported(*example("swift full")).text)).train.lr == 1e-5


def test_gpus_of_the_command_line_set_the_batch_where_no_file_says_them() -> None:
    text = "model: Q/Q\ndataset: [rows.jsonl]\nper_device_train_batch_size: 2\n"
    path = write("swift.yaml", text + "gradient_accumulation_steps: 3\n")

    for gpus, ranks in ((None, 1), (1, 1), (8, 8)):
        config = config_of(imported(path, gpus=gpus))
        assert config["cluster"]["gpus_per_node"] == ranks
        assert config["train"]["global_batch_samples"] == 2 * 3 * ranks


# TRL and accelerate.


def test_a_qlora_of_trl_is_trained_alike() -> None:
    config = config_of(imported(*example("trl qlora")))

    assert config["data"] == {
        "train": [{"source": "huggingface", "name": "trl-lib/Capybara"}],
        "validation": [{"source": "huggingface", "name": "trl-lib/Capybara", "split": "test"}],
    }
    assert config["tokenize"] == {"max_tokens": 2048, "over_long": "truncate"}
    assert config["train"] == {
        "method": "lora",
        "global_batch_tokens": 2 * 8 * 2048,
        "epochs": 1,
        "lr": 2e-4,
        "lr_schedule": "cosine",
        "warmup_fraction": 0.03,
        "weight_decay": 0,
        "beta2": 0.999,
        "validate_every_steps": 100,
        "lora": {
            "rank": 32,
            "alpha": 16,
            "dropout": 0.05,
            "targets": ["q_proj", "v_proj"],
            "base": "nf4",
        },
    }


def test_the_yaml_that_accelerate_is_given_is_read_and_the_commands_own_options_decide() -> None:
    write("zero3.yaml", ZERO3)
    result = imported(write("sft.sh", TRL_COMMAND))

    config = config_of(result)
    assert config["cluster"] == {"gpus_per_node": 4}
    assert config["tokenize"]["max_tokens"] == 1024
    train = config["train"]
    assert (train["strategy"], train["precision"]) == ("zero3", "bf16")
    assert (train["global_batch_samples"], train["lr"], train["epochs"]) == (2 * 8 * 4, 2e-5, 3)
    eight = [row for row in result.rows for one in row.keys if one.value == 8 and "num" in one.name]
    assert [row.why for row in eight] == [
        "without effect there, too: the command's own options decide"
    ]
    # by default the questions of a conversation are trained on there
    assert any("assistant_only_loss, not given" in row.there for row in result.rows)


def test_a_file_of_accelerate_belongs_beside_another() -> None:
    config = config_of(imported(*example("trl and accelerate")))

    assert config["cluster"] == {"gpus_per_node": 8}
    train = config["train"]
    assert (train["strategy"], train["reshard_after_forward"]) == ("fsdp", False)
    assert train["global_batch_tokens"] == 2 * 8 * 8 * 2048
    assert "precision" not in train  # TRL's bf16, our default, whatever accelerate is told
    alone = imported(write("fsdp2.yaml", FSDP2))
    assert alone.missing == ("model", "data")


def test_a_command_reads_the_yaml_that_it_names() -> None:
    write("sft.yaml", TRL_QLORA)
    result = imported(write("run.sh", "trl sft --config sft.yaml --learning_rate 1e-5\n"))

    train = config_of(result)["train"]
    assert (train["lr"], train["lora"]["rank"]) == (1e-5, 32)


def test_several_machines_are_named_and_the_batch_counts_all_gpus() -> None:
    text = FSDP2.replace("num_machines: 1", "num_machines: 2").replace("es: 8", "es: 16")
    result = imported(write("sft.yaml", TRL_QLORA), write("fsdp2.yaml", text))

    assert config_of(result)["cluster"] == {"gpus_per_node": 8}
    assert config_of(result)["train"]["global_batch_tokens"] == 2 * 8 * 16 * 2048
    assert "cluster.nodes" in row_of(result, "num_machines").why


@pytest.mark.parametrize(
    ("line", "gpus", "lr"),
    [
        ("torchrun --nproc_per_node 4 --master_port 1 sft.py --learning_rate 1e-5", 4, 1e-5),
        ("nohup python -m torch.distributed.run --nproc_per_node=2 sft.py &", 2, 2e-5),
        ("accelerate launch --multi_gpu --num_processes 3 -m trl.scripts.sft --packing", 3, 2e-5),
        ("deepspeed --num_gpus 2 train.py --learning_rate 3e-5 --output_dir out", 2, 3e-5),
        ("llamafactory-cli train lf.yaml learning_rate=3e-5", 1, 3e-5),
        ("axolotl train a.yaml --learning-rate 3e-5", 1, 3e-5),
        ("swift sft --model Q/Q --use_hf 1 --tuner_type lora", 1, 1e-4),
        (
            "n=2\nNPROC_PER_NODE=$n swift sft --model Q/Q --learning_rate 3e-5 "
            "--gradient_accumulation_steps $(expr 16 / $n) --save_total_limit -1\n"
            "swift infer --adapters output",
            2,
            3e-5,
        ),
    ],
)
def test_commands_in_the_forms_that_people_write(line: str, gpus: int, lr: float) -> None:
    write("lf.yaml", "model_name_or_path: Q/Q\nfinetuning_type: full\nlearning_rate: 1e-5\n")
    write("a.yaml", AXOLOTL_FSDP)

    config = config_of(imported(write("run.sh", f"#!/bin/bash\nset -e\n{line}\n")))

    assert config["cluster"] == {"gpus_per_node": gpus}
    assert config["train"]["lr"] == lr


# What is refused.


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("megatron sft --model Q/Q --dataset a\n", "`megatron sft` splits a model"),
        ("NPROC_PER_NODE=2 swift rlhf --rlhf_type dpo --model Q/Q\n", "preference and reward"),
        ("swift infer --model Q/Q\n", "`swift infer` does not train; expected swift sft"),
        ("trl grpo --model_name_or_path Q/Q\n", "preference and reward"),
        ("accelerate launch examples/scripts/dpo.py --beta 0.1\n", "preference and reward"),
        ("swift sft --model Q/Q\nswift sft --model R/R\n", "holds several commands"),
        ("swift sft --model Q/Q --dataset $(cat names)\n", "$(cat is not evaluated"),
        ("trl sft --config none.yaml\n", "none.yaml: this file is not here"),
        ("base_model: Q/Q\nrl: dpo\n", "rl: dpo: preference and reward"),
        ("model: Q/Q\nrlhf_type: grpo\ntrain_type: lora\n", "rlhf_type: grpo: preference"),
        ("model_name_or_path: Q/Q\ndataset_name: a/b\nbeta: 0.1\n", "beta: 0.1: preference"),
        ("model: Q/Q\ntask_type: embedding\ndataset: [a/b]\n", "task_type: embedding"),
        ("base_model: Q/Q\nadapter: ia3\nlearning_rate: 1e-4\n", "adapter: ia3 does not exist"),
        (
            "base_model: Q/Q\ndatasets: [{path: a/b, message_property_mappings: 1}, {}, 2]\n",
            "datasets[0].message_property_mappings: 1 is no mapping",
        ),
        ("model: Q/Q\ntruncation_strategy: middle\n", "truncation_strategy: middle is not one of"),
    ],
)
def test_what_cannot_be_trained_here_is_refused_with_the_reason(text: str, fact: str) -> None:
    found = problems(write("file", text))

    assert any(fact in problem for problem in found), found


def test_an_empty_switch_of_preferences_is_none() -> None:
    assert imported(write("a.yaml", AXOLOTL_FSDP + "rl:\n")).missing == ()


def test_two_trainings_are_refused() -> None:
    found = problems(write("a.yaml", AXOLOTL_FSDP), write("b.yaml", TRL_QLORA))

    assert "Axolotl and TRL: import one training at a time" in found


def test_gpus_that_contradict_a_file_are_refused() -> None:
    paths = [write("sft.yaml", TRL_QLORA), write("fsdp2.yaml", FSDP2)]

    with pytest.raises(Exception, match="--gpus: 2: contradicts num_processes: 8"):
        imported(*paths, gpus=2)
