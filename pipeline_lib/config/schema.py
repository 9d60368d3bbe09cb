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
    """A real Qwen3 of about a million parameters with random weights, built here: no hub, no GPU."""

    source: Literal["tiny"] = Field(
        description="`tiny` (built here), `local` (a folder), `huggingface` or `modelscope`"
    )
    tokenizer: str | None = Field(None, description="folder with `tokenizer.json` to build around; else one is trained")
    vocab_tokens: Annotated[int, Field(ge=300, le=65536)] = Field(
        2048, description="size of the vocabulary that is trained where no tokenizer is given"
    )
    hidden_size: Annotated[int, Field(ge=1, le=65_536)] = Field(128, description="width of the residual stream")
    layers: Annotated[int, Field(ge=1, le=1_000)] = Field(4, description="decoder layers")
    heads: Annotated[int, Field(ge=1, le=1_024)] = Field(4, description="query heads; key-value heads are half as many")
    seed: Seed = Field(0, description="of the random weights")

    @model_validator(mode="after")
    def _divisible(self) -> "TinyModel":
        if self.heads % 2 or self.hidden_size % (2 * self.heads):
            raise ValueError("heads must be even, and hidden_size a multiple of twice the heads")
        return self


class LocalModel(Section):
    """A model folder on this machine, in Hugging Face format with safetensors weights."""

    source: Literal["local"] = Field(description="a folder here")
    path: str = Field(description="the folder; its content is the key, not its name")


class HubRepository(Section):
    """A repository of a hub at one revision. Mirrors go by the clients' environment variables (`HF_ENDPOINT`, ...)."""

    source: Literal["huggingface", "modelscope"] = Field(description="the hub")
    name: Annotated[str, Field(pattern=REPOSITORY_PATTERN)] = Field(description="`owner/name` on the hub")
    revision: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="commit, tag or branch; none is the main branch. What is no commit is looked up once and remembered"
        " in the store",
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
    """A model of a hub."""


class Weighted(Section):
    """What all data sources have."""

    weight: Annotated[FiniteFloat, Field(gt=0.0, le=10_000.0)] = Field(
        1.0, description="times that each sample is used per epoch; 0.5 uses every other one, in turns"
    )


class Rows(Weighted):
    """How the rows of a source are read."""

    format: RowFormat = Field("auto", description="`auto` decides from the first usable row of each file, and says so")
    columns: dict[str, str] = Field(
        {}, description="other names of columns and keys, `{output: answer}`; `{label: ignore}` leaves one out"
    )
    roles: dict[str, Role] = Field({}, description="other names of roles, `{bot: assistant}`")
    max_rows: Positive | None = Field(None, description="use the first rows only")

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
    """Questions and answers made from the documentation of the running Python: no network, no foreign data."""

    source: Literal["pydoc"] = Field(description="`pydoc` (made here), `file`, `huggingface` or `modelscope`")
    max_rows: Positive = Field(6000, description="conversations to make at the most")


class FileData(Rows):
    """Conversations or texts in files on this machine."""

    source: Literal["file"] = Field(description="files here")
    path: str = Field(
        description="a json, jsonl, csv (each also with .gz), parquet or arrow file, a glob, or a folder that "
        "`datasets` saved (`save_to_disk`); content and names of the files are the key, not their place"
    )
    split: str | None = Field(
        None, description="of a folder that holds several, as a `DatasetDict` saves it; none is its `train`"
    )


class HubData(HubRepository, Rows):
    """A data set of a hub: which of its files, by subset and split or by name."""

    subset: str | None = Field(None, description="configuration of the data set; none is its default")
    split: str = Field("train", description="split of the data set")
    files: tuple[str, ...] = Field((), description="globs of files to take instead of `subset` and `split`")


ModelSource = Annotated[TinyModel | LocalModel | HubModel, Field(discriminator="source")]
DataSource = Annotated[PydocData | FileData | HubData, Field(discriminator="source")]


# Every key that a config file may hold, with its type, default, unit and meaning.
#
# docs/config.md and the JSON schema for editors are generated from here. Secrets are never keys.

AnySection = TypeVar("AnySection", bound=Section)


class Data(Section):
    """What to train on, and how much to hold out."""

    train: Annotated[tuple[DataSource, ...], Field(min_length=1)] = Field(description="the sources, all used")
    validation_fraction: Annotated[FiniteFloat, Field(gt=0.0, lt=1.0)] = Field(
        0.05,
        description="of the conversations, held out for evaluation; those that begin with the same question, and bring"
        " the same system message, never part",
    )


class Tokenize(Section):
    """From conversations to supervised token sequences."""

    max_tokens: Tokens = Field(1024, description="longest sample; what is longer is counted, see `over_long`")
    over_long: Literal["drop", "truncate", "split", "error"] = Field(
        "drop",
        description="what happens to a longer sample; `split` cuts raw text into consecutive samples, and conversations"
        " behind the last answer that fits",
    )
    thinking: Literal["keep", "strip", "mask"] = Field(
        "keep", description="thinking of the assistant: trained on, removed, or kept without being trained on"
    )
    prompt_thinking: Literal["off", "on"] = Field(
        "off",
        description="how answers without thinking are asked for: `off` gives the model an empty thinking block, as"
        " `enable_thinking=False` does; `on` asks as with thinking, and the model learns to write that block itself",
    )
    train_on: Literal["all_assistant", "last_assistant"] = Field(
        "all_assistant", description="which turns of a conversation are trained on"
    )
    system: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="system message of conversations that bring none"
    )
    tools: tuple[Tool, ...] = Field((), description="tools, as JSON schemas, of conversations that bring none")
    duplicates: Literal["keep", "drop"] = Field(
        "keep", description="conversations equal to an earlier one; counted in any case"
    )
    near_duplicates: Annotated[FiniteFloat, Field(gt=0.0, lt=1.0)] | None = Field(
        None,
        description="from this similarity on (Jaccard, of 5-grams of characters, estimated) a conversation counts as a"
        " duplicate too; needs the extra `dedup`",
    )
    max_dropped_fraction: Fraction = Field(
        0.05, description="of the samples of each source; more dropped or cut, for whatever reason, fails the stage"
    )
    max_quarantined_fraction: Fraction = Field(0.0, description="of the rows; more unusable rows fail the stage")


class Shard(Section):
    """Packing of samples into blocks of constant length, and their order."""

    block_tokens: Tokens = Field(1024, description="length of a packed block; the model's training sequence")
    shards: Annotated[int, Field(ge=1, le=100_000)] = Field(
        4, description="files of training blocks, at the least; none is over 256 MiB"
    )
    seed: Seed = Field(0, description="of the validation split and of the packing")


# In Gbit/s or GB/s: from below what a modem gives to above what any link does, so that no prediction overflows.
Bandwidth = Annotated[FiniteFloat, Field(ge=0.001, le=100_000)]


class Cluster(Section):
    """Where it runs. Nothing here changes what is computed, so nothing here reruns a finished stage."""

    nodes: Annotated[int, Field(ge=1, le=10_000)] = Field(
        1, description="machines of the same kind; more than one train as a SLURM job"
    )
    gpus_per_node: Annotated[int, Field(ge=0, le=64)] = Field(0, description="one rank for each; 0 trains on the CPU")
    gpu: str | None = Field(
        None, description="kind of the GPUs, as `h200` or `a100 80gb`: what the plan knows of their memory and speed"
    )
    internode_gbit_s: Bandwidth | None = Field(
        None, description="what a node sends to another at a time, as iperf3 measures it, in Gbit/s"
    )
    intranode_gbyte_s: Bandwidth | None = Field(
        None, description="bus bandwidth of a collective within a node, in GB/s; none is what is usual for `gpu`"
    )
    measured: str | None = Field(
        None, description="cluster.json that `python -m pipeline_lib calibrate` wrote: measured rates for the plan"
    )
    cpu_ranks: Annotated[int, Field(ge=1, le=1024)] = Field(2, description="ranks where there is no GPU")
    launcher: Literal["auto", "torchrun", "accelerate", "deepspeed", "srun"] = Field(
        "auto",
        description="what starts the ranks; `srun` starts one task for each, within a SLURM job; `auto` is `srun` there"
        " and `torchrun` elsewhere",
    )
    cpus_per_rank: Annotated[int, Field(ge=1, le=4096)] = Field(1, description="threads of each rank")
    memory_gb: Annotated[int, Field(ge=1, le=1_000_000)] | None = Field(
        None, description="host memory of a node that a cluster job asks for, in GB; by default what the plan predicts"
    )
    runtime_minutes: Annotated[int, Field(ge=1, le=366 * 24 * 60)] | None = Field(
        None,
        description="longest time that a cluster job of the training may take before it saves and is queued again;"
        " by default what the plan predicts, with a margin",
    )
    max_requeues: Annotated[int, Field(ge=0, le=100_000)] = Field(
        20, description="times that a cluster job of the training is queued again after an interruption"
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


# The linear modules of a Qwen3 layer.
LinearName = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Lora(Section):
    """Low-rank adapters, used where `train.method` is `lora`."""

    rank: Annotated[int, Field(ge=1, le=16_384)] = Field(16, description="r, the rank of the update of each matrix")
    alpha: Annotated[int, Field(ge=1, le=1_000_000)] = Field(32, description="the update is scaled by alpha / rank")
    dropout: Annotated[FiniteFloat, Field(ge=0.0, lt=1.0)] = Field(0.0, description="on the adapter's input")
    targets: Annotated[tuple[LinearName, ...], Field(min_length=1)] | Literal["all-linear"] = Field(
        "all-linear",
        description="linear modules of each layer, or all of them; of a model with experts only those of attention,"
        " since its experts are fused, and its routers are left alone",
    )
    rslora: bool = Field(False, description="rank-stabilised: the update is scaled by alpha / sqrt(rank)")
    dora: bool = Field(False, description="weight-decomposed: a trained magnitude for each row of the matrix")
    lr_ratio: Annotated[FiniteFloat, Field(ge=1.0, le=10_000.0)] = Field(
        1.0, description="learning rate of B over that of A (LoRA+); 16 is its authors' choice"
    )


class Guards(Section):
    """What happens to a step whose loss or gradient cannot be trusted. All ranks decide alike."""

    spike_deviations: Annotated[FiniteFloat, Field(gt=0.0)] | None = Field(
        20.0,
        description="a loss this many median absolute deviations over the median of the last accepted steps is a spike;"
        " none looks at what is not finite only",
    )
    window_steps: Annotated[int, Field(ge=10)] = Field(
        64, description="accepted steps that a spike is measured against"
    )
    max_skips: Positive = Field(
        3, description="steps skipped within `window_steps`; one more goes back to the last checkpoint, then gives up"
    )


# Keys of `train` whose name in a config file (right) differs from that in specs, plans and results, which keep their
# digests by it (left). A file may still use the name on the left.
RENAMED = {"recompute": "activation_checkpointing", "reshard": "reshard_after_forward"}


class Train(Section):
    """The training run."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    strategy: Literal["auto", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3"] = Field(
        "ddp",
        description="how the model is spread: `ddp` replicates it, `fsdp` shards it (FSDP2), `hsdp` shards it over some"
        " ranks and replicates that, `zero1` to `zero3` are DeepSpeed's; `auto` lets the plan choose the fastest that"
        " fits, and with it whatever of `shard_ranks`, `micro_batch_blocks` and `offload` is not given",
    )
    shard_ranks: Positive | None = Field(
        None, description="ranks that share one copy of the model under `hsdp`; none is those of a node"
    )
    unit_layers: Positive = Field(1, description="decoder layers that `fsdp` and `hsdp` gather at a time")
    offload: Literal["none", "optimizer", "optimizer+params"] = Field(
        "none",
        description="what is kept in host memory: `fsdp` and `hsdp` take all or nothing, `zero1` and `zero2` the"
        " optimizer, `zero3` either",
    )
    recompute: Literal["auto", "none", "selective", "full"] = Field(
        "auto",
        validation_alias=RENAMED["recompute"],
        description="activations that are computed again for the gradients instead of kept: `full` keeps the input of"
        " each layer, `selective` also the products and the attention; `auto` is the fastest that fits",
    )
    reshard: Literal["auto"] | bool = Field(
        "auto",
        validation_alias=RENAMED["reshard"],
        description="give back what `fsdp` and `hsdp` have gathered of a layer after its forward pass, and gather it"
        " again for the gradients; `auto` keeps it where there is memory for the whole model",
    )
    compile: Literal["auto"] | bool = Field(
        "auto",
        description="compile each decoder layer (torch.compile); not with `zero3`. `auto` does it on GPUs, under"
        " torch's own strategies, in runs that are long enough to win the half minute back",
    )
    attention: Literal["auto", "flash"] = Field(
        "auto",
        description="on GPUs: `auto` is cuDNN's kernel where a Hopper GPU and the extra `cudnn` are there, else torch's"
        " `flash`",
    )
    deepspeed_json: str | None = Field(
        None, description="a DeepSpeed config whose placement keys are merged over the one made here"
    )
    micro_batch_blocks: Positive = Field(1, description="blocks that a rank takes through the model at a time")
    save_every_steps: Positive = Field(100, description="optimizer steps between checkpoints: what a kill can cost")
    save_async: bool = Field(True, description="write checkpoints beside the training, which waits for a copy only")
    keep_last: Annotated[int, Field(ge=1, le=100_000)] = Field(
        2, description="checkpoints kept while training, beside the best"
    )
    timeout_s: Seconds = Field(
        300, description="longest wait for another rank, after the first step, before the run is given up"
    )
    start_timeout_s: Seconds = Field(
        900, description="the same until the end of the first step, and wherever ranks read or write whole models"
    )
    sample_every_steps: Positive | None = Field(None, description="steps between answers to held-out prompts")
    profile_every_steps: Positive | None = Field(
        None, description="steps between profiled ones, which tell compute, communication, copies and idle time apart"
    )
    deterministic: bool = Field(False, description="on GPUs: algorithms that give the same bits each time, and slower")
    method: Literal["full", "lora"] = Field("full", description="all weights, or adapters beside frozen ones")
    precision: Literal["bf16", "fp8", "fp16", "fp32"] = Field(
        "bf16",
        description="of the arithmetic; trained weights are kept in fp32, and gradients added up in it. `fp8` is bf16"
        " with the layers' products in 8 bits, for `method: full` on GPUs from Ada on; needs the extra `fp8`",
    )
    optimizer: Literal["adamw", "adamw_8bit"] = Field(
        "adamw", description="`adamw_8bit` keeps its moments in 8 bits; needs the extra `optim8bit`"
    )
    gradient_compression: Literal["none", "bf16", "powersgd"] = Field(
        "none",
        description="of the gradients that ranks exchange, an approximation for slow networks: `bf16` halves them,"
        " `powersgd` sends factors of low rank and is for `ddp` only",
    )
    powersgd_rank: Annotated[int, Field(ge=1, le=16_384)] = Field(
        4, description="rank of the approximation, where `gradient_compression` is `powersgd`"
    )
    local_sgd_steps: Positive = Field(
        1, description="updates that each rank makes by itself before `ddp` averages the models; an approximation"
    )
    global_batch_tokens: Positive = Field(
        65536, description="tokens of an optimizer step over all ranks; a multiple of `shard.block_tokens`"
    )
    global_batch_samples: Positive | None = Field(
        None,
        description="samples of an optimizer step over all ranks, instead of `global_batch_tokens`: a step takes as"
        " many blocks as hold that many samples on average",
    )
    epochs: Annotated[
        FiniteFloat, Field(gt=0, le=10_000), AfterValidator(_integral), PlainSerializer(_integral, return_type=Any)
    ] = Field(1, description="passes over the training blocks, each as often as its weight says; 0.5 is half of one")
    max_steps: Positive | None = Field(
        None, description="optimizer steps of the run, instead of `epochs`: the schedule ends there"
    )
    until_step: Positive | None = Field(
        None, description="stop at this step, to continue later; the schedule still spans the whole run"
    )
    lr: Annotated[FiniteFloat, Field(gt=0.0, le=1e30)] = Field(1e-5, description="peak learning rate")
    lr_schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine", description="after the warm-up; `wsd` stays at `lr` and falls linearly over the last `decay_fraction`"
    )
    warmup_fraction: Fraction = Field(0.03, description="of all steps, rising linearly from 0 to `lr`")
    warmup_steps: Annotated[int, Field(ge=0)] | None = Field(
        None, description="the same in steps, instead of the fraction"
    )
    decay_fraction: Fraction = Field(0.1, description="of all steps, at the end of a `wsd` schedule")
    min_lr_fraction: Fraction = Field(0.0, description="of `lr`, reached at the last step")
    weight_decay: Annotated[FiniteFloat, Field(ge=0.0, le=100.0)] = Field(0.01, description="on matrices only")
    beta1: Annotated[FiniteFloat, Field(ge=0.0, lt=1.0)] = Field(0.9, description="AdamW")
    beta2: Annotated[FiniteFloat, Field(ge=0.0, lt=1.0)] = Field(0.95, description="AdamW")
    adam_eps: Annotated[FiniteFloat, Field(gt=0.0, le=1.0)] = Field(1e-8, description="AdamW's epsilon")
    max_grad_norm: Annotated[FiniteFloat, Field(gt=0.0)] = Field(1.0, description="gradients are clipped to this norm")
    freeze: tuple[str, ...] = Field(
        (), description="parameters that are not trained, by glob: `model.embed_tokens.*`, `model.layers.[0-3].*`"
    )
    router_aux_loss: Annotated[FiniteFloat, Field(ge=0.0, le=1000.0)] = Field(
        0.001, description="weight of the loss that keeps the experts of a MoE model in balance; 0 leaves it out"
    )
    validate_every_steps: Positive | None = Field(None, description="steps between losses on the held-out blocks")
    early_stop_validations: Positive | None = Field(
        None, description="stop when this many validations in a row brought no better loss"
    )
    keep_best: bool = Field(False, description="the result is the validated step of the lowest loss, not the last one")
    guards: Guards = Guards()
    seed: Seed = Field(0, description="of the sample order and of new adapter weights")
    replica: str | None = Field(None, description="a name that keeps apart runs which compute the same")
    lora: Lora = Lora()

    @property
    def uses_deepspeed(self) -> bool:
        """Whether DeepSpeed's engine trains, and not torch's own strategies."""
        return self.strategy.startswith("zero")

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
    """Other places that show a run while it trains. They read metrics.jsonl; one that fails never stops training."""

    to: tuple[Literal["tensorboard", "swanlab", "wandb", "mlflow"], ...] = Field(
        (), description="trackers to feed; each has an extra of its name, and keeps its files in the run's directory"
    )
    project: str = Field("qwen3-pipeline", description="what the trackers call the project")


class Merge(Section):
    """The model folder that comes out."""

    dtype: Literal["auto", "bf16", "fp32"] = Field("auto", description="of the weights; `auto` is the base model's")


class Evaluate(Section):
    """Base against tuned, on what was held out."""

    prompts: tuple[str, ...] = Field(
        (),
        description="questions of yours to answer, beside held-out ones; asked with `tokenize.system` and"
        " `tokenize.tools`, and with thinking where all answers were trained so, else without",
    )
    generations: Annotated[int, Field(ge=0, le=100_000)] = Field(6, description="held-out prompts to answer")
    max_new_tokens: Tokens = Field(96, description="longest answer")


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
    """The whole file."""

    sweep: dict[str, tuple[Any, ...] | dict[str, Any]] = Field(
        {},
        description="many experiments from this file, named by what differs: lists of values for keys of the sections,"
        " as `{train.lr: [1e-4, 2e-4], train.seed: [1, 2]}`; `list` and `random`, and `halving`: docs/sweeps.md",
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
        *("strategy", "shard_ranks", "unit_layers", "offload", "recompute", "reshard", "compile"),
        *("attention", "deepspeed_json"),
        *("micro_batch_blocks", "save_every_steps", "save_async", "keep_last", "timeout_s", "start_timeout_s"),
        *("sample_every_steps", "profile_every_steps", "deterministic"),
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
