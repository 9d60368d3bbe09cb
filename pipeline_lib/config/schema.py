"""Every key that a config file may hold, with its type, default, unit and meaning."""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    PlainSerializer,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from pipeline_lib.core.errors import IntegrityError
from pipeline_lib.core.text import did_you_mean

# What all sections of a config are, and the kinds of values that many keys share.

Fraction = Annotated[FiniteFloat, Field(ge=0.0, le=1.0)]
Positive = Annotated[int, Field(ge=1)]
MOST_TOKENS = 1 << 24
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Seconds = Annotated[int, Field(ge=1, le=366 * 24 * 3600)]
Seed = Annotated[int, Field(ge=0)]


def _integral(value: float) -> float:
    """Return `value`, 2.0 as 2: specs hash what is written, and both mean the same."""
    return int(value) if value == int(value) else value


class Section(BaseModel):
    """Base of all sections: frozen, and a key that is not declared is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


# The tools of `tokenize.tools`: what is no function's JSON schema is refused before anything runs.
#
# The tokenize stage reads them as it reads those of a row, and takes what is let through here.

_EXPECTED = 'expected {"name": ..., "parameters": ...} or {"type": "function", "function": {"name": ...}}'


def _as_json_text(value: Any) -> Any:
    """`value` as JSON text. Raises ValueError; its message may follow the value or stand alone."""
    tool = _object(value)
    if tool is None:
        raise ValueError(f"is no object: {_EXPECTED}")
    function: dict[str, Any] | None = tool
    if "function" in tool:
        function = _object(tool["function"])
        if function is None or tool.get("type", "function") != "function":
            raise ValueError(f"is no function: {_EXPECTED}")
    name = function.get("name") if function else None
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"has no `name`: {_EXPECTED}")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _object(value: Any) -> dict[str, Any] | None:
    """An object, or the one that a JSON text holds; None if it is neither."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) else None


# Kept as JSON text: a spec is written with sorted keys, and the model is shown a tool's in the order they were given.
Tool = Annotated[str, BeforeValidator(_as_json_text), WithJsonSchema({"type": "object"})]


# Where a model and its data come from: the keys of `model` and of each item of `data.train`.

REPOSITORY_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$"


class TinyModel(Section):
    """A small Qwen3 model with random weights, built on this machine: no hub, no GPU."""

    source: Literal["tiny"] = Field(
        description="`tiny` (built here), `local` (a folder), `huggingface` or `modelscope`"
    )
    tokenizer: str | None = Field(None, description="folder with a `tokenizer.json`; without it, one is trained")
    vocab_tokens: Annotated[int, Field(ge=300, le=65536)] = Field(
        2048, description="vocabulary size of the tokenizer that is trained"
    )
    hidden_size: Annotated[int, Field(ge=1, le=65_536)] = Field(128, description="hidden size")
    layers: Annotated[int, Field(ge=1, le=1_000)] = Field(4, description="decoder layers")
    heads: Annotated[int, Field(ge=1, le=1_024)] = Field(4, description="query heads; key-value heads are half as many")
    seed: Seed = Field(0, description="seed of the random weights")

    @model_validator(mode="after")
    def _divisible(self) -> "TinyModel":
        if self.heads % 2 or self.hidden_size % (2 * self.heads):
            raise ValueError("heads must be even, and hidden_size a multiple of twice the heads")
        return self


class LocalModel(Section):
    """A model folder on this machine, in Hugging Face format with safetensors weights."""

    source: Literal["local"] = Field(description="`local`: a folder on this machine")
    path: str = Field(description="the model folder; stages rerun if its content changes, not if it is renamed")


class HubRepository(Section):
    """A repository of a hub at one revision. Mirrors go by the clients' environment variables (`HF_ENDPOINT`, ...)."""

    source: Literal["huggingface", "modelscope"] = Field(description="the hub")
    name: Annotated[str, Field(pattern=REPOSITORY_PATTERN)] = Field(description="`owner/name` on the hub")
    revision: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="commit, tag or branch; default: the hub's main branch. A tag or branch is resolved to a commit"
        " once, and the store remembers it",
    )


RowFormat = Literal["auto", "alpaca", "sharegpt", "messages", "prompt_completion", "text"]
# What a row may call by another name, see `columns`.
COLUMN_NAMES = (
    "instruction", "input", "output", "history", "system", "conversations", "from", "value", "messages", "role",
    "content", "reasoning_content", "tool_calls", "tools", "prompt", "completion", "text",
)  # fmt: skip
IGNORE = "ignore"  # in `columns`: the key of that name is left out on purpose
# What data sets often call them.
_USUAL_NAMES = {
    **dict.fromkeys(("response", "answer", "reply"), "output' or 'completion"),
    **dict.fromkeys(("question", "query"), "instruction' or 'prompt"),
    **dict.fromkeys(("reasoning", "thinking", "think"), "reasoning_content"),
    **dict.fromkeys(("conversation", "dialog", "dialogue"), "conversations' or 'messages"),
}
Role = Literal["system", "user", "assistant", "tool", "function_call"]


class HubModel(HubRepository):
    """A model from a hub."""


class Weighted(Section):
    """Keys of every data source."""

    weight: Annotated[FiniteFloat, Field(gt=0.0, le=10_000.0)] = Field(
        1.0, description="uses of each sample per epoch; with 0.5, each epoch uses half of the samples, in turns"
    )


class Rows(Weighted):
    """How the rows of a source are read."""

    format: RowFormat = Field("auto", description="layout; `auto` detects it from the first usable row of each file")
    columns: dict[str, str] = Field(
        {}, description="our name, then yours: `{output: answer}`; `{label: ignore}` skips the column `label`"
    )
    roles: dict[str, Role] = Field({}, description="your role name, then ours: `{bot: assistant}`")
    max_rows: Positive | None = Field(None, description="use only this many rows, from the beginning")

    @field_validator("columns")
    @classmethod
    def _known(cls, columns: dict[str, str]) -> dict[str, str]:
        unknown = [(ours, theirs) for ours, theirs in columns.items() if ours not in COLUMN_NAMES and theirs != IGNORE]
        if unknown:
            raise ValueError("; ".join(_unknown_column(ours, theirs) for ours, theirs in unknown))
        return columns

    @property
    def ignored(self) -> frozenset[str]:
        """The columns and keys that are left out on purpose."""
        return frozenset(key for key, value in self.columns.items() if value == IGNORE)


def _unknown_column(ours: str, theirs: str) -> str:
    if theirs in COLUMN_NAMES:
        return f"write our name first and the file's second, {{{theirs}: {ours}}}"
    usual = _USUAL_NAMES.get(ours)
    hint = f"; did you mean '{usual}'?" if usual else did_you_mean(ours, COLUMN_NAMES, cutoff=0.7)
    return f"{ours!r} is not one of {', '.join(COLUMN_NAMES)}{hint}"


class PydocData(Weighted):
    """Questions and answers made from the documentation of the running Python: no network, no files."""

    source: Literal["pydoc"] = Field(description="`pydoc` (made here), `file`, `huggingface` or `modelscope`")
    max_rows: Positive = Field(6000, description="maximum number of conversations")


class FileData(Rows):
    """Conversations or texts in files on this machine."""

    source: Literal["file"] = Field(description="`file`: files on this machine")
    path: str = Field(
        description="a json, jsonl, csv (each also with .gz), parquet or arrow file, a glob, or a folder saved by"
        " `datasets` (`save_to_disk`); stages rerun if the content or the names of the files change, not if they are"
        " moved"
    )
    split: str | None = Field(None, description="split of a folder saved from a `DatasetDict`; default: `train`")


class HubData(HubRepository, Rows):
    """A data set from a hub. Choose its files by subset and split, or by name."""

    subset: str | None = Field(None, description="configuration of the data set; default: its default configuration")
    split: str = Field("train", description="split of the data set")
    files: tuple[str, ...] = Field((), description="globs of the files to read, instead of `subset` and `split`")


ModelSource = Annotated[TinyModel | LocalModel | HubModel, Field(discriminator="source")]
DataSource = Annotated[PydocData | FileData | HubData, Field(discriminator="source")]


# Every key that a config file may hold, with its type, default, unit and meaning.
#
# docs/config.md and the JSON schema for editors are generated from here. Secrets are never keys.

AnySection = TypeVar("AnySection", bound=Section)


class Data(Section):
    """The training data, and how much of it to hold out."""

    train: Annotated[tuple[DataSource, ...], Field(min_length=1)] = Field(description="list of sources; all are used")
    validation_fraction: Annotated[FiniteFloat, Field(gt=0.0, lt=1.0)] = Field(
        0.05,
        description="fraction of the conversations held out for evaluation; conversations with the same first question"
        " and system message go to the same split",
    )


class Tokenize(Section):
    """How conversations become token sequences, and which tokens are trained on."""

    max_tokens: Tokens = Field(1024, description="longest sample in tokens; for longer ones see `over_long`")
    over_long: Literal["drop", "truncate", "split", "error"] = Field(
        "drop",
        description="what to do with a longer sample: `drop` it, `truncate` its end, `split` raw text into consecutive"
        " samples and cut a conversation after the last answer that fits, or stop with an `error`",
    )
    thinking: Literal["keep", "strip", "mask"] = Field(
        "keep",
        description="thinking in the assistant's messages: `keep` trains on it, `strip` removes it, `mask` keeps it in"
        " the context but does not train on it",
    )
    prompt_thinking: Literal["off", "on"] = Field(
        "off",
        description="prompt of answers without thinking: `off` puts an empty thinking block into it, as"
        " `enable_thinking=False` does; with `on`, the model learns to write that block itself",
    )
    train_on: Literal["all_assistant", "last_assistant"] = Field(
        "all_assistant", description="train on every answer of a conversation, or only on the last"
    )
    system: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="system message for conversations without one"
    )
    tools: tuple[Tool, ...] = Field((), description="tools, as JSON schemas, for conversations without any")
    duplicates: Literal["keep", "drop"] = Field(
        "keep", description="whether to keep conversations equal to an earlier one; they are counted either way"
    )
    near_duplicates: Annotated[FiniteFloat, Field(gt=0.0, lt=1.0)] | None = Field(
        None,
        description="conversations with at least this similarity count as duplicates too (estimated Jaccard similarity"
        " of character 5-grams); needs the extra `dedup`",
    )
    max_dropped_fraction: Fraction = Field(
        0.05, description="the stage fails if more than this fraction of a source's samples is dropped or cut"
    )
    max_quarantined_fraction: Fraction = Field(0.0, description="a larger fraction of unusable rows fails the stage")


class Shard(Section):
    """Packing of samples into blocks of constant length."""

    block_tokens: Tokens = Field(1024, description="tokens of a packed block: the sequence length of the training")
    shards: Annotated[int, Field(ge=1, le=100_000)] = Field(
        4, description="minimum number of files for the training blocks; no file is over 256 MiB"
    )
    seed: Seed = Field(0, description="seed of the validation split and of the packing")


# In Gbit/s or GB/s: from below what a modem gives to above what any link does, so that no prediction overflows.
Bandwidth = Annotated[FiniteFloat, Field(ge=0.001, le=100_000)]


class Cluster(Section):
    """Machines and launcher. These keys do not change what is computed, so changing them reruns no finished stage."""

    nodes: Annotated[int, Field(ge=1, le=10_000)] = Field(
        1,
        description="number of nodes, all of the same kind; training on more than one runs as a SLURM job or on"
        " `hosts` of the site file, or on machines that join",
    )
    gpus_per_node: Annotated[int, Field(ge=0, le=64)] = Field(0, description="one rank per GPU; 0 trains on the CPU")
    gpu: str | None = Field(
        None, description="GPU model, such as `h200` or `a100 80gb`; the plan looks up its memory and speed"
    )
    internode_gbit_s: Bandwidth | None = Field(
        None,
        description="bandwidth from one node to another in Gbit/s, as iperf3 measures it; required for more than one"
        " node unless `measured` is set",
    )
    intranode_gbyte_s: Bandwidth | None = Field(
        None, description="bus bandwidth of a collective within a node, in GB/s; default: the usual value for `gpu`"
    )
    measured: str | None = Field(
        None,
        description="path of a cluster.json from `python -m pipeline_lib calibrate`; the plan then uses measured rates",
    )
    cpu_ranks: Annotated[int, Field(ge=1, le=1024)] = Field(2, description="ranks of a node without GPUs")
    launcher: Literal["auto", "torchrun", "accelerate", "deepspeed", "srun"] = Field(
        "auto",
        description="program that starts the ranks; `auto` is `srun` within a SLURM job (one task per rank),"
        " `torchrun` elsewhere",
    )
    cpus_per_rank: Annotated[int, Field(ge=1, le=4096)] = Field(1, description="CPU threads of a rank")
    memory_gb: Annotated[int, Field(ge=1, le=1_000_000)] | None = Field(
        None, description="host memory that a cluster job requests on each node, in GB; default: what the plan predicts"
    )
    runtime_minutes: Annotated[int, Field(ge=1, le=366 * 24 * 60)] | None = Field(
        None,
        description="time limit of a training job on a cluster; shortly before it, the job saves and is queued again;"
        " default: what the plan predicts, with a margin",
    )
    max_requeues: Annotated[int, Field(ge=0, le=100_000)] = Field(
        20, description="maximum number of times that an interrupted training job is queued again"
    )

    @property
    def ranks_per_node(self) -> int:
        """One for each GPU, or as many as asked for where there is none."""
        return self.gpus_per_node or self.cpu_ranks

    @property
    def cpus_per_node(self) -> int:
        """Threads of the ranks of a node."""
        return self.ranks_per_node * self.cpus_per_rank

    @property
    def ranks(self) -> int:
        """World size."""
        return self.nodes * self.ranks_per_node

    @property
    def device(self) -> str:
        """`cuda` or `cpu`."""
        return "cuda" if self.gpus_per_node else "cpu"


# The linear modules of a Qwen3 layer, and the matrices of its experts, by peft's names.
LinearName = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TargetName = Literal[LinearName, "experts.gate_up_proj", "experts.down_proj"]


class Lora(Section):
    """Low-rank adapters, used with `train.method: lora`."""

    rank: Annotated[int, Field(ge=1, le=16_384)] = Field(16, description="rank r of the update of each matrix")
    alpha: Annotated[int, Field(ge=1, le=1_000_000)] = Field(32, description="the update is scaled by alpha / rank")
    dropout: Annotated[FiniteFloat, Field(ge=0.0, lt=1.0)] = Field(0.0, description="dropout on the adapter's input")
    targets: Annotated[tuple[TargetName, ...], Field(min_length=1)] | Literal["all-linear"] = Field(
        "all-linear",
        description="linear modules that get an adapter in each layer, or all of them; in MoE models `all-linear` is"
        " those of the attention, and `experts.gate_up_proj` and `experts.down_proj` give each expert an adapter",
    )
    rslora: bool = Field(False, description="rank-stabilized LoRA: the update is scaled by alpha / sqrt(rank)")
    dora: bool = Field(False, description="weight-decomposed LoRA: a magnitude is trained for each row of the matrix")
    base: Literal["unquantized", "nf4"] = Field(
        "unquantized", description="frozen weights of the layers; `nf4` keeps them in 4 bits (QLoRA), not those of MoE"
    )
    lr_ratio: Annotated[FiniteFloat, Field(ge=1.0, le=10_000.0)] = Field(
        1.0, description="LoRA+: learning rate of B divided by that of A; its authors use 16"
    )

    @property
    def of_experts(self) -> tuple[str, ...]:
        """The `targets` that are matrices of experts."""
        return () if self.targets == "all-linear" else tuple(name for name in self.targets if "." in name)


class Guards(Section):
    """What happens to a step whose loss or gradient is not finite or is a spike. All ranks decide alike."""

    spike_deviations: Annotated[FiniteFloat, Field(gt=0.0)] | None = Field(
        20.0,
        description="a loss is a spike if it is this many median absolute deviations above the median of the last"
        " accepted steps; null checks only whether it is finite",
    )
    window_steps: Annotated[int, Field(ge=10)] = Field(
        64, description="a loss is compared with those of this many accepted steps; `max_skips` counts in as many steps"
    )
    max_skips: Positive = Field(
        3,
        description="steps that may be skipped within `window_steps`; one more returns to an earlier checkpoint, and"
        " if that happens again, the run ends",
    )


# Keys of `train` whose name in a config file (right) differs from that in specs, plans and results, which keep their
# digests by it (left). A file may still use the name on the left.
RENAMED = {"recompute": "activation_checkpointing", "reshard": "reshard_after_forward"}


class Train(Section):
    """Strategy, checkpoints, batch, optimizer and validation of the training."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    strategy: Literal["auto", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3"] = Field(
        "ddp",
        description="`ddp` replicates the model, `fsdp` shards it (FSDP2), `hsdp` shards it within groups of ranks and"
        " replicates the groups, `zero1` to `zero3` use DeepSpeed; with `auto` the plan chooses the fastest that fits"
        " in memory, and also `shard_ranks`, `micro_batch_blocks` and `offload` unless they are set",
    )
    shard_ranks: Positive | None = Field(
        None, description="ranks that share one copy of the model under `hsdp`; default: all ranks of one node"
    )
    unit_layers: Positive = Field(1, description="decoder layers that `fsdp` and `hsdp` gather at a time")
    offload: Literal["none", "optimizer", "optimizer+params"] = Field(
        "none",
        description="state kept in host memory: `zero1` and `zero2` can offload the optimizer, `fsdp` and `hsdp` only"
        " both together, `zero3` either",
    )
    recompute: Literal["auto", "none", "selective", "full"] = Field(
        "auto",
        validation_alias=RENAMED["recompute"],
        description="activations to recompute in the backward pass: `full` keeps only the input of each layer,"
        " `selective` also the results of matrix products and attention; `auto` is the fastest that fits in memory",
    )
    reshard: Literal["auto"] | bool = Field(
        "auto",
        validation_alias=RENAMED["reshard"],
        description="`true`: `fsdp` and `hsdp` free the gathered weights of a layer after its forward pass and gather"
        " them again for the backward pass; `auto` keeps them if there is memory for the whole model",
    )
    compile: Literal["auto"] | bool = Field(
        "auto",
        description="compile each decoder layer with torch.compile; not with `zero3`. `auto` compiles on GPUs under"
        " `ddp`, `fsdp` and `hsdp`, if that saves more than the half minute that it takes",
    )
    attention: Literal["auto", "flash"] = Field(
        "auto",
        description="attention kernel on GPUs: `auto` is cuDNN's on a Hopper GPU with the extra `cudnn`, else torch's"
        " flash kernel; `flash` is always torch's",
    )
    deepspeed_json: str | None = Field(
        None,
        description="path of a DeepSpeed config; its keys for memory and speed, such as bucket"
        " sizes and prefetch, are merged over the generated one",
    )
    micro_batch_blocks: Positive = Field(1, description="blocks in a micro-batch of one rank")
    save_every_steps: Positive = Field(100, description="optimizer steps between checkpoints")
    save_async: bool = Field(
        True, description="write checkpoints in the background; the training waits only for a copy"
    )
    keep_last: Annotated[int, Field(ge=1, le=100_000)] = Field(
        2, description="checkpoints to keep while training, beside the best"
    )
    timeout_s: Seconds = Field(
        300, description="seconds that a rank waits for another, after the first step, before the run is given up"
    )
    start_timeout_s: Seconds = Field(
        900, description="the same until the end of the first step, and wherever ranks read or write whole models"
    )
    sample_every_steps: Positive | None = Field(None, description="steps between answers to held-out prompts")
    profile_every_steps: Positive | None = Field(
        None, description="steps between profiled steps, which record compute, communication, copies and idle time"
    )
    deterministic: bool = Field(False, description="on GPUs: use algorithms that give the same bits each time; slower")
    method: Literal["full", "lora"] = Field(
        "full", description="`full` trains all weights, `lora` trains adapters beside frozen weights"
    )
    precision: Literal["bf16", "fp8", "fp16", "fp32"] = Field(
        "bf16",
        description="compute precision; trained weights and sums of gradients are fp32. `fp8` is bf16 with the layers'"
        " matrix products in 8 bits, for `method: full` on GPUs from Ada on; needs the extra `fp8`",
    )
    optimizer: Literal["adamw", "adamw_8bit"] = Field(
        "adamw", description="`adamw_8bit` keeps its moments in 8 bits; needs the extra `optim8bit`"
    )
    gradient_compression: Literal["none", "bf16", "powersgd"] = Field(
        "none",
        description="approximation for slow networks, applied to the gradients that ranks exchange: `bf16` halves"
        " their size, `powersgd` sends low-rank factors and works with `ddp` only",
    )
    powersgd_rank: Annotated[int, Field(ge=1, le=16_384)] = Field(
        4, description="rank of the factors with `gradient_compression: powersgd`"
    )
    local_sgd_steps: Positive = Field(
        1, description="updates that each rank makes alone before `ddp` averages the models; an approximation"
    )
    global_batch_tokens: Positive = Field(
        65536, description="tokens of an optimizer step over all ranks; a multiple of `shard.block_tokens`"
    )
    global_batch_samples: Positive | None = Field(
        None,
        description="samples of an optimizer step over all ranks, instead of `global_batch_tokens`; a step takes as"
        " many blocks as hold that many samples on average",
    )
    epochs: Annotated[
        FiniteFloat, Field(gt=0, le=10_000), AfterValidator(_integral), PlainSerializer(_integral, return_type=Any)
    ] = Field(
        1, description="passes over the training data, in which each source is used `weight` times; may be a fraction"
    )
    max_steps: Positive | None = Field(
        None, description="optimizer steps of the run, instead of `epochs`; the learning rate schedule ends there"
    )
    until_step: Positive | None = Field(
        None, description="stop at this step and continue later; the schedule still spans the whole run"
    )
    lr: Annotated[FiniteFloat, Field(gt=0.0, le=1e30)] = Field(1e-5, description="peak learning rate")
    lr_schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine", description="after the warm-up; `wsd` stays at `lr`, then falls linearly in the last `decay_fraction`"
    )
    warmup_fraction: Fraction = Field(
        0.03, description="fraction of all steps in which the learning rate rises linearly from 0 to `lr`"
    )
    warmup_steps: Annotated[int, Field(ge=0)] | None = Field(
        None, description="the same in steps, instead of `warmup_fraction`"
    )
    decay_fraction: Fraction = Field(
        0.1, description="fraction of all steps in which a `wsd` schedule falls, at the end"
    )
    min_lr_fraction: Fraction = Field(0.0, description="the last step's learning rate, as a fraction of `lr`")
    weight_decay: Annotated[FiniteFloat, Field(ge=0.0, le=100.0)] = Field(
        0.01, description="weight decay, applied to matrices only"
    )
    beta1: Annotated[FiniteFloat, Field(ge=0.0, lt=1.0)] = Field(0.9, description="AdamW's beta1")
    beta2: Annotated[FiniteFloat, Field(ge=0.0, lt=1.0)] = Field(0.95, description="AdamW's beta2")
    adam_eps: Annotated[FiniteFloat, Field(gt=0.0, le=1.0)] = Field(1e-8, description="AdamW's epsilon")
    max_grad_norm: Annotated[FiniteFloat, Field(gt=0.0)] = Field(1.0, description="gradients are clipped to this norm")
    freeze: tuple[str, ...] = Field(
        (), description="globs of the parameters that are not trained: `model.embed_tokens.*`, `model.layers.[0-3].*`"
    )
    router_aux_loss: Annotated[FiniteFloat, Field(ge=0.0, le=1000.0)] = Field(
        0.001, description="weight of the load-balancing loss of a MoE model; 0 leaves it out"
    )
    validate_every_steps: Positive | None = Field(
        None, description="steps between measurements of the held-out loss; default: none while training"
    )
    early_stop_validations: Positive | None = Field(
        None, description="stop after this many validations in a row without a lower held-out loss"
    )
    keep_best: bool = Field(False, description="the result is the step with the lowest held-out loss, not the last one")
    guards: Guards = Guards()
    seed: Seed = Field(0, description="seed of the sample order and of new adapter weights")
    replica: str | None = Field(
        None, description="any name; runs that differ only in it are trained separately, to repeat a run"
    )
    lora: Lora = Lora()

    @property
    def uses_deepspeed(self) -> bool:
        """Whether DeepSpeed's engine trains, and not torch's own strategies."""
        return self.strategy.startswith("zero")

    @property
    def checkpoints_on_disk(self) -> int:
        """The most checkpoints that are on the disk at once: those that are kept, and the one being written."""
        return self.keep_last + self.keep_best + 1

    @property
    def replaced_keys(self) -> frozenset[str]:
        """The keys that have no effect, because another key is given instead."""
        pairs = {
            "global_batch_samples": "global_batch_tokens",
            "max_steps": "epochs",
            "warmup_steps": "warmup_fraction",
        }
        return frozenset(old for new, old in pairs.items() if getattr(self, new) is not None)

    def batch_blocks(self, block_tokens: int, samples_per_block: float) -> int:
        """Return the blocks of an optimizer step, given the mean number of samples in a block.

        It does not depend on the ranks, so that a run computes the same on any number of them.
        """
        if self.global_batch_samples is None:
            return self.global_batch_tokens // block_tokens
        return max(1, round(self.global_batch_samples / samples_per_block))

    def accumulation(self, batch_blocks: int, ranks: int) -> int:
        """Return the micro-batches of a rank in a step of `batch_blocks` blocks; in the last, some may be missing."""
        return math.ceil(batch_blocks / (ranks * self.micro_batch_blocks))


class Tracking(Section):
    """Experiment trackers that show a run while it trains. A tracker that fails never stops the training."""

    to: tuple[Literal["tensorboard", "swanlab", "wandb", "mlflow"], ...] = Field(
        (), description="trackers to use; each needs the extra of its name, and keeps its files in the run's directory"
    )
    project: str = Field("qwen3-pipeline", description="name of the project in the trackers")


class Merge(Section):
    """The exported model folder."""

    dtype: Literal["auto", "bf16", "fp32"] = Field(
        "auto", description="data type of the weights; `auto` is the base model's"
    )
    base: Literal["dequantized", "original"] = Field(
        "dequantized", description="after `lora.base: nf4`: the weights of the training, or the original ones, unproven"
    )


class Evaluate(Section):
    """Comparison of the base model with the tuned model on held-out data."""

    prompts: tuple[str, ...] = Field(
        (),
        description="your own questions, answered beside the held-out prompts; they use `tokenize.system` and"
        " `tokenize.tools`, and thinking is on only if all trained answers have thinking",
    )
    generations: Annotated[int, Field(ge=0, le=100_000)] = Field(6, description="number of held-out prompts to answer")
    max_new_tokens: Tokens = Field(96, description="maximum length of an answer in tokens")


NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._=-]{0,127}$"


class Config(Section):
    """The config of one experiment."""

    experiment: Annotated[str, Field(pattern=NAME_PATTERN)] = Field(
        description="name of the experiment: letters, digits, '.', '_', '-' and '='"
    )
    model: ModelSource
    data: Data
    tokenize: Tokenize = Tokenize()
    shard: Shard = Shard()
    cluster: Cluster = Cluster()
    train: Train = Train()
    tracking: Tracking = Tracking()
    merge: Merge = Merge()
    evaluate: Evaluate = Evaluate()


class ConfigFile(Config):
    """The keys outside the sections."""

    sweep: dict[str, tuple[Any, ...] | dict[str, Any]] = Field(
        {},
        description="several experiments from one file, named by what differs: lists of values for keys of the"
        " sections, such as `{train.lr: [1e-4, 2e-4], train.seed: [1, 2]}`; also `list`, `random` and `halving`:"
        " docs/sweeps.md",
    )


def fields_of(section: type[Section], above: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every key of `section`, `train.lora.rank`, with its field, also those of its subsections.

    Keys that hold one of several kinds of section, such as `model`, are not entered.
    """
    for name, field in section.model_fields.items():
        yield above + str(field.validation_alias or name), field
        kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type)]
        sections = [kind for kind in kinds if issubclass(kind, Section)]
        if len(sections) == 1:
            yield from fields_of(sections[0], f"{above}{name}.")


# What the plan chooses: where the value is `auto`, and with `strategy: auto` whatever of it the file does not give.
CHOSEN_KEYS = ("shard_ranks", "micro_batch_blocks", "recompute", "offload", "reshard", "compile")

# Keys of `train` that say where and how often, not what is computed: recorded with the run, never in its key.
PLACEMENT_KEYS = frozenset(
    {
        *("strategy", "shard_ranks", "unit_layers", "offload", "recompute", "reshard", "compile", "attention"),
        *("micro_batch_blocks", "save_every_steps", "save_async", "keep_last", "timeout_s", "start_timeout_s"),
        *("sample_every_steps", "profile_every_steps", "deterministic", "deepspeed_json"),
    }
)


def in_file(key: str) -> str:
    """Return the key `key` of `train` as a config file writes it, `train.reshard_after_forward`."""
    return f"train.{RENAMED.get(key, key)}"


def settings_of(section: Section, exclude: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The keys of `section` that differ from their defaults: what a spec holds and hashes."""
    return section.model_dump(mode="json", exclude_defaults=True, exclude=set(exclude))


def read_settings(section: type[AnySection], settings: Mapping[str, Any]) -> AnySection:
    """The section that `settings_of` wrote, its defaults filled in. Raises IntegrityError."""
    try:
        return section.model_validate_json(json.dumps(dict(settings)))
    except ValidationError as error:
        reason = str(error).splitlines()[0]
        message = f"a spec holds settings that this code does not know ({reason}); run snakemake again"
        raise IntegrityError(message) from error
