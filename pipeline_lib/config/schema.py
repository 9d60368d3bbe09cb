"""Every config key with its type, default, unit and meaning; those of `train` are in train.py."""

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    ConfigDict,
    Discriminator,
    Field,
    FiniteFloat,
    Tag,
    field_validator,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from pipeline_lib.config.benchmarks import NO_RULES, Benchmark, Ship
from pipeline_lib.config.exports import ExportType, Merge, Push
from pipeline_lib.config.rope import Rope
from pipeline_lib.config.section import (
    Fraction,
    LocalPath,
    Positive,
    RepositoryName,
    Section,
    Seed,
    Tokens,
)
from pipeline_lib.config.template_values import Tool, Variable, free_variables
from pipeline_lib.config.train import Train
from pipeline_lib.core.language import Language
from pipeline_lib.core.text import did_you_mean

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._=-]{0,127}$"

StretchedBy = Annotated[
    Rope | None,
    Field(
        description="YaRN, for blocks and answers longer than the model's positions; default: none"
    ),
]


class TinyModel(Section):
    """A small Qwen3 model with random weights, built on this machine: no hub, no GPU."""

    source: Literal["tiny"] = Field(
        description="`tiny` (built here), `local` (a folder), `huggingface`, `modelscope` or "
        "`experiment`"
    )
    tokenizer: LocalPath | None = Field(
        None, description="folder with a `tokenizer.json`; without it, one is trained"
    )
    vocab_tokens: Annotated[int, Field(ge=300, le=65536)] = Field(
        2048, description="vocabulary size of the tokenizer that is trained"
    )
    hidden_size: Annotated[int, Field(ge=1, le=65_536)] = Field(128, description="hidden size")
    layers: Annotated[int, Field(ge=1, le=1_000)] = Field(4, description="decoder layers")
    heads: Annotated[int, Field(ge=1, le=1_024)] = Field(
        4, description="query heads; key-value heads are half as many"
    )
    seed: Seed = Field(0, description="seed of the random weights")
    rope: StretchedBy = None

    @model_validator(mode="after")
    def _divisible(self) -> "TinyModel":
        if self.heads % 2 or self.hidden_size % (2 * self.heads):
            raise ValueError("heads must be even, and hidden_size a multiple of twice the heads")
        return self


class HubRepository(Section):
    """A repository of a hub at one revision.

    Mirrors go by the clients' environment variables (`HF_ENDPOINT`, ...).
    """

    source: Literal["huggingface", "modelscope"] = Field(description="the hub")
    name: RepositoryName = Field(description="`owner/name` on the hub")
    revision: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="commit, tag or branch; default: the hub's main branch. A tag or branch is "
        "resolved to a commit once, and the store remembers it",
    )


class LocalAdapter(Section):
    """Adapters in a folder on this machine, as peft saves them."""

    source: Literal["local"] = Field(description="`local`, or a hub: `huggingface`, `modelscope`")
    path: LocalPath = Field(
        description="folder with adapter_config.json and adapter_model.safetensors; stages rerun if "
        "their content changes, not if it is renamed"
    )


class HubAdapter(HubRepository):
    """Adapters from a hub, as peft saves them."""


AdapterSource = Annotated[LocalAdapter | HubAdapter, Field(discriminator="source")]
StartingAdapter = Annotated[
    AdapterSource | None,
    Field(
        description="adapters for this model that the training goes on from (docs/chains.md); "
        "default: new ones"
    ),
]


class LocalModel(Section):
    """A model folder on this machine, in Hugging Face format with safetensors weights."""

    source: Literal["local"] = Field(description="`local`: a folder on this machine")
    path: LocalPath = Field(
        description="the model folder; stages rerun if its content changes, not if it is renamed"
    )
    adapter: StartingAdapter = None
    rope: StretchedBy = None


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

    adapter: StartingAdapter = None
    rope: StretchedBy = None


class Weighted(Section):
    """Keys of every data source."""

    weight: Annotated[FiniteFloat, Field(gt=0.0, le=10_000.0)] = Field(
        1.0,
        description="uses of each sample per epoch; with 0.5, each epoch uses half of the samples, "
        "in turns",
    )


class Rows(Weighted):
    """How the rows of a source are read."""

    format: RowFormat = Field(
        "auto", description="layout; `auto` detects it from the first usable row of each file"
    )
    columns: dict[str, str] = Field(
        {},
        description="our name, then yours: `{output: answer}`; `{label: ignore}` skips the column "
        "`label`",
    )
    roles: dict[str, Role] = Field({}, description="your role name, then ours: `{bot: assistant}`")
    max_rows: Positive | None = Field(
        None, description="use only this many rows, from the beginning"
    )

    @field_validator("columns")
    @classmethod
    def _known(cls, columns: dict[str, str]) -> dict[str, str]:
        unknown = []
        for ours, theirs in columns.items():
            if ours not in COLUMN_NAMES and theirs != IGNORE:
                unknown.append((ours, theirs))
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
    """Questions and answers from the running Python's documentation: no network, no files."""

    source: Literal["pydoc"] = Field(
        description="`pydoc` (made here), `file`, `huggingface` or `modelscope`"
    )
    max_rows: Positive = Field(6000, description="maximum number of conversations")


class FileData(Rows):
    """Conversations or texts in files on this machine."""

    source: Literal["file"] = Field(description="`file`: files on this machine")
    path: LocalPath = Field(
        description="a json, jsonl, csv (each also with .gz), parquet or arrow file, a glob, or a "
        "folder saved by `datasets` (`save_to_disk`); stages rerun if the content or the names of "
        "the files change, not if they are moved"
    )
    split: str | None = Field(
        None, description="split of a folder saved from a `DatasetDict`; default: `train`"
    )


class HubData(HubRepository, Rows):
    """A data set from a hub. Choose its files by subset and split, or by name."""

    subset: str | None = Field(
        None, description="configuration of the data set; default: its default configuration"
    )
    split: str = Field("train", description="split of the data set")
    files: tuple[str, ...] = Field(
        (), description="globs of the files to read, instead of `subset` and `split`"
    )


class ExperimentModel(Section):
    """The merged model of another experiment, which this one goes on from (docs/chains.md)."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    source: Literal["experiment"] = Field(
        description="`experiment`: another one of this file, or of the file `config`"
    )
    name: Annotated[str, Field(pattern=NAME_PATTERN)] | None = Field(
        None,
        description="name of the experiment; needed unless `config` is a file with only one",
    )
    config: LocalPath | None = Field(
        None, description="config file of the experiment; default: this file"
    )
    adapter: Literal["merge", "continue"] = Field(
        "merge",
        description="of an experiment with adapters: train on its merged model, with new ones "
        "(`merge`), or train the same adapters on (`continue`)",
    )
    rope: StretchedBy = None
    # No key of files, which are read by alias: `config/chains.py` puts the experiment here that
    # `name` and `config` mean, so that a config alone says everything that it compiles to.
    parent: SkipJsonSchema["Config | None"] = Field(None, validation_alias="the parent's config")

    @model_validator(mode="after")
    def _named(self) -> "ExperimentModel":
        if self.name is None and self.config is None:
            raise ValueError(
                "needs `name`, that of another experiment of this file, or `config`, another file"
            )
        return self


ModelSource = Annotated[
    TinyModel | LocalModel | HubModel | ExperimentModel, Field(discriminator="source")
]
DataSource = Annotated[PydocData | FileData | HubData, Field(discriminator="source")]


# Every key that a config file may hold, with its type, default, unit and meaning.
#
# docs/config.md and the JSON schema for editors are generated from here. Secrets are never keys.


class Data(Section):
    """The training data, and what is held out to judge the training by."""

    train: Annotated[tuple[DataSource, ...], Field(min_length=1)] = Field(
        description="list of sources; all are used"
    )
    validation: tuple[DataSource, ...] = Field(
        (),
        description="list of sources, with the same keys as those of `train`, that are held out as "
        "a whole, instead of a fraction of `train`",
    )
    validation_fraction: Annotated[FiniteFloat, Field(ge=0.0, lt=1.0)] = Field(
        0.05,
        description="fraction of the conversations of `train` held out for evaluation; "
        "conversations with the same first question and system message go to the same split. 0 "
        "holds nothing out; with `validation`, this key is left out",
    )

    @property
    def sources(self) -> tuple[DataSource, ...]:
        """All sources, as the stages number them: first those to train on, then held-out ones."""
        return (*self.train, *self.validation)

    @property
    def held_out_fraction(self) -> float:
        """The fraction of `train` that is held out: 0 if there are sources for that."""
        return 0.0 if self.validation else self.validation_fraction

    @property
    def held_out_sources(self) -> tuple[DataSource, ...]:
        """The sources that held-out conversations come from: none if nothing is held out."""
        if self.validation:
            return self.validation
        return self.train if self.validation_fraction else ()

    def key_of(self, number: int) -> str:
        """Return the key of the source `number` of `sources`, `data.train[0]`."""
        return source_key(number, len(self.train))


# In the specs of tokenize and shard: how many of the last sources are those of data.validation.
VALIDATION_SOURCES = "validation_sources"


def source_key(number: int, trained: int) -> str:
    """Return the key of source `number`, as stages count, if the first `trained` are trained on."""
    return f"data.train[{number}]" if number < trained else f"data.validation[{number - trained}]"


class Tokenize(Section):
    """How conversations become token sequences, and which tokens are trained on."""

    max_tokens: Tokens = Field(
        1024, description="longest sample in tokens; for longer ones see `over_long`"
    )
    over_long: Literal["drop", "truncate", "split", "error"] = Field(
        "drop",
        description="what to do with a longer sample: `drop` it, `truncate` its end, `split` raw "
        "text into consecutive"
        " samples and cut a conversation after the last answer that fits, or stop with an `error`",
    )
    thinking: Literal["keep", "strip", "mask"] = Field(
        "keep",
        description="thinking in the assistant's messages: `keep` trains on it, `strip` removes "
        "it, `mask` keeps it in the context but does not train on it",
    )
    prompt_thinking: Literal["off", "on"] = Field(
        "off",
        description="prompt of answers without thinking: `off` puts an empty thinking block into "
        "it, as"
        " `enable_thinking=False` does; with `on`, the model learns to write that block itself",
    )
    chat_template_kwargs: Annotated[dict[str, Variable], AfterValidator(free_variables)] = Field(
        {},
        description="variables that the model's chat template reads, `{reasoning_effort: low}`, "
        "for all rows; the trained model has to be called with the same ones",
    )
    train_on: Literal["all_assistant", "last_assistant"] = Field(
        "all_assistant", description="train on every answer of a conversation, or only on the last"
    )
    system: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="system message for conversations without one"
    )
    tools: tuple[Tool, ...] = Field(
        (), description="tools, as JSON schemas, for conversations without any"
    )
    duplicates: Literal["keep", "drop"] = Field(
        "keep",
        description="whether to keep conversations equal to an earlier one; they are counted "
        "either way",
    )
    near_duplicates: Annotated[FiniteFloat, Field(gt=0.0, lt=1.0)] | None = Field(
        None,
        description="conversations with at least this similarity count as duplicates too "
        "(estimated Jaccard similarity of character 5-grams); needs the extra `dedup`",
    )
    max_dropped_fraction: Fraction = Field(
        0.05,
        description="the stage fails if more than this fraction of a source's samples is dropped "
        "or cut",
    )
    max_quarantined_fraction: Fraction = Field(
        0.0, description="the stage fails if more than this fraction of the rows is unusable"
    )


class Shard(Section):
    """Packing of samples into blocks of constant length."""

    block_tokens: Tokens = Field(
        1024, description="tokens of a packed block: the sequence length of the training"
    )
    shards: Annotated[int, Field(ge=1, le=100_000)] = Field(
        4, description="minimum number of files for the training blocks; no file is over 256 MiB"
    )
    seed: Seed = Field(0, description="seed of the validation split and of the packing")


# In Gbit/s or GB/s: from below what a modem gives to above what any link does, so that no
# prediction overflows.
Bandwidth = Annotated[FiniteFloat, Field(ge=0.001, le=100_000)]


class GpuSheet(Section):
    """A GPU described by hand, by the figures of its data sheet, dense and in decimal units."""

    name: Annotated[str, Field(min_length=1, max_length=80)] = Field(
        description="what plans and reports call it"
    )
    memory_gb: Annotated[FiniteFloat, Field(ge=1, le=10_000)] = Field(
        description="memory that torch can allocate from, in GB; what it reports is about 1 % less "
        "than `nvidia-smi` shows"
    )
    bf16_tflops: Annotated[FiniteFloat, Field(ge=0.1, le=100_000)] = Field(
        description="peak of dense bf16 products that are summed in fp32, in TFLOP/s"
    )
    memory_gb_s: Annotated[FiniteFloat, Field(ge=1, le=1_000_000)] = Field(
        description="memory bandwidth in GB/s"
    )
    link_gb_s: Bandwidth = Field(
        5.0,
        description="bus bandwidth of a collective between GPUs of a node, in GB/s; the default is "
        "that of PCIe without P2P",
    )


def _kind_of_gpu(value: object) -> str:
    """Return which kind of value `cluster.gpu` has, by the names of types in pydantic's errors."""
    return "GpuSheet" if isinstance(value, dict | GpuSheet) else "str"


# A GPU's name, or its data sheet.
GpuModel = Annotated[
    Annotated[str, Tag("str")] | Annotated[GpuSheet, Tag("GpuSheet")], Discriminator(_kind_of_gpu)
]


class Cluster(Section):
    """Machines and launcher.

    Changing these keys reruns no finished stage, because they do not change what is computed. The
    exception is the number of ranks with `train.local_sgd_steps` or `train.gradient_compression:
    powersgd`.
    """

    nodes: Annotated[int, Field(ge=1, le=10_000)] = Field(
        1,
        description="number of nodes, all of the same kind; training on more than one runs as a "
        "SLURM job, on the `hosts` of the site file, or on machines that run `join`",
    )
    gpus_per_node: Annotated[int, Field(ge=0, le=64)] = Field(
        0, description="one rank per GPU; 0 trains on the CPU"
    )
    gpu: GpuModel | None = Field(
        None,
        description="GPU model, such as `h200` or `a100 80gb`; the plan looks up its memory and "
        "speed. A GPU that it does not know is described by hand: `{name: ..., memory_gb: ..., "
        "bf16_tflops: ..., memory_gb_s: ..., link_gb_s: ...}`",
    )
    gpu_hour_price: Annotated[float, Field(gt=0, le=1_000_000)] | None = Field(
        None,
        description="price of one GPU for an hour, in any currency; the plan then says what the "
        "training costs",
    )
    internode_gbit_s: Bandwidth | None = Field(
        None,
        description="bandwidth from one node to another in Gbit/s, as iperf3 measures it; required "
        "for more than one node unless `measured` is set",
    )
    intranode_gbyte_s: Bandwidth | None = Field(
        None,
        description="bus bandwidth of a collective within a node, in GB/s; default: the usual "
        "value for `gpu`",
    )
    measured: LocalPath | None = Field(
        None,
        description="path of a cluster.json from `qwen3 calibrate CONFIG`, whose "
        "rates the plan uses",
    )
    cpu_ranks: Annotated[int, Field(ge=1, le=1024)] = Field(
        2, description="ranks of a node without GPUs"
    )
    launcher: Literal["auto", "spawn", "srun"] = Field(
        "auto",
        description="what starts the ranks: `srun` (one task per rank, within a SLURM job) or "
        "`spawn` (one process on each node, which starts its ranks); `auto` is `srun` within a "
        "SLURM job, `spawn` elsewhere",
    )
    cpus_per_rank: Annotated[int, Field(ge=1, le=4096)] = Field(
        1, description="CPU threads of a rank"
    )
    memory_gb: Annotated[int, Field(ge=1, le=1_000_000)] | None = Field(
        None,
        description="host memory of a node in GB: the plan checks against it, and a SLURM job "
        "requests it; default: for named GPUs the plan checks offloading against a typical size, "
        "else it checks nothing; a job requests what the plan predicts",
    )
    runtime_minutes: Annotated[int, Field(ge=1, le=366 * 24 * 60)] | None = Field(
        None,
        description="time limit of a training job on a cluster; shortly before it, the job saves "
        "and is queued again; default: what the plan predicts, with a margin",
    )
    max_requeues: Annotated[int, Field(ge=0, le=100_000)] = Field(
        20, description="maximum number of times that an interrupted training job is queued again"
    )

    @property
    def gpu_name(self) -> str | None:
        """The name of the GPUs; None if it is not given."""
        return self.gpu.name if isinstance(self.gpu, GpuSheet) else self.gpu

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
    def has_known_gpus(self) -> bool:
        """Whether there are GPUs whose memory and speed the plan knows."""
        is_known = self.gpu is not None or self.measured is not None
        return self.gpus_per_node > 0 and is_known

    @property
    def device(self) -> str:
        """`cuda` or `cpu`."""
        return "cuda" if self.gpus_per_node else "cpu"


class Tracking(Section):
    """Experiment trackers that show a run while it trains.

    A tracker that fails never stops the training.
    """

    to: tuple[Literal["tensorboard", "swanlab", "wandb", "mlflow"], ...] = Field(
        (),
        description="trackers to use; each needs the extra of its name, and keeps its files in the "
        "run's directory",
    )
    project: str = Field("qwen3-pipeline", description="name of the project in the trackers")


class Evaluate(Section):
    """Comparison of the base model with the tuned model on held-out data."""

    prompts: tuple[str, ...] = Field(
        (),
        description="your own questions, answered beside the held-out prompts; they use "
        "`tokenize.system` and"
        " `tokenize.tools`, and thinking is on only if all trained answers have thinking",
    )
    generations: Annotated[int, Field(ge=0, le=100_000)] = Field(
        6, description="number of held-out prompts to answer"
    )
    max_new_tokens: Tokens = Field(96, description="maximum length of an answer in tokens")
    benchmarks: tuple[Benchmark, ...] = Field(
        (),
        description="list of files with questions whose answers are known: what the tuned model "
        "answers right, beside the base model (docs/benchmarks.md)",
    )


class Report(Section):
    """The page of an experiment's results."""

    language: Language = Field(
        "en",
        description="language of the page: `en` or `zh`; the sentences of the plan stay in "
        "English. The terminal's is that of its locale, or of the environment variable QWEN3_LANG",
    )


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
    ship: Ship = NO_RULES
    export: tuple[ExportType, ...] = Field(
        (),
        description="the merged model for other programs, each read back and compared with it: "
        "`gguf-f16`, `gguf-q8_0`, `gguf-q4_k_m` (needs the extra `llamacpp`) for llama.cpp and "
        "Ollama, `fp8` for vLLM and SGLang",
    )
    report: Report = Report()
    push: Push = Push()

    @property
    def asked(self) -> Evaluate:
        """The section `evaluate`, without prompts drawn from held-out data if there is none."""
        if self.data.held_out_sources:
            return self.evaluate
        return self.evaluate.model_copy(update={"generations": 0})

    @property
    def parent(self) -> "Config | None":
        """The experiment whose merged model this one trains on; None without one."""
        return self.model.parent if isinstance(self.model, ExperimentModel) else None

    @property
    def rope(self) -> Rope | None:
        """What the positions of its model are stretched by, here or in an experiment before."""
        if self.model.rope is not None or self.parent is None:
            return self.model.rope
        return self.parent.rope

    @property
    def starting_adapter(self) -> LocalAdapter | HubAdapter | None:
        """The adapters of others that it trains on; None without any."""
        if isinstance(self.model, LocalModel | HubModel):
            return self.model.adapter
        return None

    @property
    def continues(self) -> bool:
        """Whether it trains the adapters of its parent on, beside the model that had them."""
        return isinstance(self.model, ExperimentModel) and self.model.adapter == "continue"

    @property
    def chain(self) -> tuple["Config", ...]:
        """The experiments that it goes on from, the first one first, and itself."""
        before = self.parent.chain if self.parent is not None else ()
        return (*before, self)

    @property
    def root(self) -> "Config":
        """The first experiment of the chain: its model's tokenizer and sizes are this one's too."""
        return self.chain[0]


class ConfigFile(Config):
    """The keys outside the sections."""

    sweep: dict[str, tuple[Any, ...] | dict[str, Any]] = Field(
        {},
        description="several experiments from one file, named by what differs: lists of values for "
        "keys of the"
        " sections, such as `{train.lr: [1e-4, 2e-4], train.seed: [1, 2]}`; also `list`, `random` "
        "and `halving`:"
        " docs/sweeps.md",
    )
    experiments: dict[str, dict[str, Any] | None] = Field(
        {},
        description="several experiments from one file, by name: of each the keys in place of the "
        "file's, section by section; `model` is replaced as a whole: docs/chains.md",
    )
