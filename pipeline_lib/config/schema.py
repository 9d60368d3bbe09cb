"""Every key that a config file may hold, with its type, default, unit and meaning.

The README's table and the JSON schema for editors are generated from here. Secrets are never keys.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from pipeline_lib.base.errors import IntegrityError

AnySection = TypeVar("AnySection", bound="Section")
Fraction = Annotated[FiniteFloat, Field(ge=0.0, le=1.0)]
Positive = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    """Base of all sections: frozen, and a key that is not declared is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TinyModel(Section):
    """A real Qwen3 of about a million parameters with random weights, built here: no hub, no GPU."""

    source: Literal["tiny"] = Field(
        description="`tiny` (built here), `local` (a folder), `huggingface` or `modelscope`"
    )
    tokenizer: str | None = Field(None, description="folder with `tokenizer.json` to build around; else one is trained")
    vocab_tokens: Annotated[int, Field(ge=300, le=65536)] = Field(
        2048, description="size of the vocabulary that is trained where no tokenizer is given"
    )
    hidden_size: Positive = Field(128, description="width of the residual stream")
    layers: Positive = Field(4, description="decoder layers")
    heads: Positive = Field(4, description="query heads; key-value heads are half as many")
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
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$")] = Field(
        description="`owner/name` on the hub"
    )
    revision: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="commit, tag or branch; none is the main branch. What is no commit is looked up once and remembered"
        " in the store",
    )


RowFormat = Literal["auto", "alpaca", "sharegpt", "messages", "prompt_completion", "text"]
# What a row may call by another name, see `columns`.
ColumnName = Literal[
    "instruction", "input", "output", "history", "system", "conversations", "from", "value", "messages", "role",
    "content", "reasoning_content", "tool_calls", "tools", "prompt", "completion", "text",
]  # fmt: skip
Role = Literal["system", "user", "assistant", "tool", "function_call"]


class HubModel(HubRepository):
    """A model of a hub."""


class Weighted(Section):
    """What all data sources have."""

    weight: Annotated[FiniteFloat, Field(gt=0.0)] = Field(
        1.0, description="times that each sample is used per epoch; 0.5 uses every other one, in turns"
    )


class Rows(Weighted):
    """How the rows of a source are read."""

    format: RowFormat = Field("auto", description="`auto` decides from the first usable row of each file, and says so")
    columns: dict[ColumnName, str] = Field({}, description="other names of columns and keys, `{output: answer}`")
    roles: dict[str, Role] = Field({}, description="other names of roles, `{bot: assistant}`")
    max_rows: Positive | None = Field(None, description="use the first rows only")


class PydocData(Weighted):
    """Questions and answers made from the documentation of the running Python: no network, no foreign data."""

    source: Literal["pydoc"] = Field(description="`pydoc` (made here), `file`, `huggingface` or `modelscope`")
    max_rows: Positive = Field(6000, description="conversations to make at the most")


class FileData(Rows):
    """Conversations or texts in files on this machine."""

    source: Literal["file"] = Field(description="files here")
    path: str = Field(
        description="a json, jsonl, csv (each also with .gz) or parquet file, or a glob; content and names of the "
        "files are the key, not their place"
    )


class HubData(HubRepository, Rows):
    """A data set of a hub: which of its files, by subset and split or by name."""

    subset: str | None = Field(None, description="configuration of the data set; none is its default")
    split: str = Field("train", description="split of the data set")
    files: tuple[str, ...] = Field((), description="globs of files to take instead of `subset` and `split`")


ModelSource = Annotated[TinyModel | LocalModel | HubModel, Field(discriminator="source")]
DataSource = Annotated[PydocData | FileData | HubData, Field(discriminator="source")]


class Data(Section):
    """What to train on, and how much to hold out."""

    train: Annotated[tuple[DataSource, ...], Field(min_length=1)] = Field(description="the sources, all used")
    validation_fraction: Annotated[FiniteFloat, Field(gt=0.0, lt=1.0)] = Field(
        0.05,
        description="of the conversations, held out for evaluation; those that begin with the same question never part",
    )


def _as_json_text(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        raise ValueError("is no object")
    return json.dumps(value, ensure_ascii=False)


# Kept as JSON text: a spec is written with sorted keys, and the model is shown a tool's in the order they were given.
Tool = Annotated[str, BeforeValidator(_as_json_text), WithJsonSchema({"type": "object"})]


class Tokenize(Section):
    """From conversations to supervised token sequences."""

    max_tokens: Positive = Field(1024, description="longest sample; what is longer is counted, see `over_long`")
    over_long: Literal["drop", "truncate", "split", "error"] = Field(
        "drop",
        description="what happens to a longer sample; `split` cuts raw text into consecutive samples, and conversations"
        " behind the last answer that fits",
    )
    thinking: Literal["keep", "strip", "mask"] = Field(
        "keep", description="thinking of the assistant: trained on, removed, or kept without being trained on"
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

    block_tokens: Positive = Field(1024, description="length of a packed block; the model's training sequence")
    shards: Positive = Field(4, description="files of training blocks, at the least; none is over 256 MiB")
    seed: Seed = Field(0, description="of the validation split and of the packing")


class Cluster(Section):
    """Where it runs. Nothing here changes what is computed, so nothing here reruns a finished stage."""

    nodes: Annotated[int, Field(ge=1, le=1)] = Field(1, description="machines; more than one is not supported yet")
    gpus_per_node: Annotated[int, Field(ge=0)] = Field(0, description="one rank for each; 0 trains on the CPU")
    cpu_ranks: Positive = Field(2, description="ranks where there is no GPU")
    cpus_per_rank: Positive = Field(1, description="threads of each rank")
    memory_gb: Positive = Field(8, description="host memory of a node that a cluster job asks for, in GB")
    runtime_minutes: Positive = Field(120, description="longest time a cluster job of the training stage may take")

    @property
    def ranks(self) -> int:
        """World size."""
        return self.nodes * (self.gpus_per_node or self.cpu_ranks)

    @property
    def device(self) -> str:
        """`cuda` or `cpu`."""
        return "cuda" if self.gpus_per_node else "cpu"


# The linear modules of a Qwen3 layer.
LinearName = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Lora(Section):
    """Low-rank adapters, used where `train.method` is `lora`."""

    rank: Positive = Field(16, description="r, the rank of the update of each matrix")
    alpha: Positive = Field(32, description="the update is scaled by alpha / rank")
    dropout: Annotated[FiniteFloat, Field(ge=0.0, lt=1.0)] = Field(0.0, description="on the adapter's input")
    targets: Annotated[tuple[LinearName, ...], Field(min_length=1)] | Literal["all-linear"] = Field(
        "all-linear", description="linear modules of each layer, or all of them"
    )


class Train(Section):
    """The training run."""

    strategy: Literal["ddp", "fsdp"] = Field(
        "ddp", description="how the model is spread: `ddp` replicates it, `fsdp` shards it (FSDP2)"
    )
    micro_batch_blocks: Positive = Field(1, description="blocks that a rank takes through the model at a time")
    save_every_steps: Positive = Field(100, description="optimizer steps between checkpoints: what a kill can cost")
    keep_last: Positive = Field(2, description="checkpoints kept while training")
    timeout_s: Positive = Field(600, description="longest wait for another rank before the run is given up")
    method: Literal["full", "lora"] = Field("full", description="all weights, or adapters beside frozen ones")
    precision: Literal["bf16", "fp32"] = Field(
        "bf16", description="of the arithmetic; trained weights are kept in fp32"
    )
    global_batch_tokens: Positive = Field(
        65536, description="tokens of an optimizer step over all ranks; a multiple of `shard.block_tokens`"
    )
    epochs: Positive = Field(1, description="passes over the training blocks, each as often as its weight says")
    until_step: Positive | None = Field(None, description="stop here, to continue later; the schedule is not changed")
    lr: Annotated[FiniteFloat, Field(gt=0.0)] = Field(1e-5, description="peak learning rate")
    lr_schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="after the warm-up")
    warmup_fraction: Fraction = Field(0.03, description="of all steps, rising linearly from 0 to `lr`")
    min_lr_fraction: Fraction = Field(0.0, description="of `lr`, reached at the last step")
    weight_decay: Annotated[FiniteFloat, Field(ge=0.0)] = Field(0.01, description="on matrices only")
    beta1: Annotated[FiniteFloat, Field(ge=0.0, lt=1.0)] = Field(0.9, description="AdamW")
    beta2: Annotated[FiniteFloat, Field(ge=0.0, lt=1.0)] = Field(0.95, description="AdamW")
    max_grad_norm: Annotated[FiniteFloat, Field(gt=0.0)] = Field(1.0, description="gradients are clipped to this norm")
    seed: Seed = Field(0, description="of the sample order and of new adapter weights")
    replica: str | None = Field(None, description="a name that keeps apart runs which compute the same")
    lora: Lora = Lora()


class Merge(Section):
    """The model folder that comes out."""

    dtype: Literal["auto", "bf16", "fp32"] = Field("auto", description="of the weights; `auto` is the base model's")


class Evaluate(Section):
    """Base against tuned, on what was held out."""

    prompts: tuple[str, ...] = Field((), description="questions of yours to answer, beside held-out ones")
    generations: Annotated[int, Field(ge=0)] = Field(6, description="held-out prompts to answer")
    max_new_tokens: Positive = Field(96, description="longest answer")


class Config(Section):
    """The whole file."""

    experiment: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = Field(
        description="name of the experiment: letters, digits, '.', '_' and '-'"
    )
    model: ModelSource
    data: Data
    tokenize: Tokenize = Tokenize()
    shard: Shard = Shard()
    cluster: Cluster = Cluster()
    train: Train = Train()
    merge: Merge = Merge()
    evaluate: Evaluate = Evaluate()


# Keys of `train` that say where and how often, not what is computed: recorded with the run, never in its key.
PLACEMENT_KEYS = frozenset({"strategy", "micro_batch_blocks", "save_every_steps", "keep_last", "timeout_s"})


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
