"""The stages, one row each: everything that goes through all stages reads this table.

The compiler, the command line, Snakemake's titles and targets, the requests of SLURM jobs, the
lineage, the report, comparisons and the removal of garbage do. The order of the rows is the order
of the stages: each reads parts of rows above it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

from pipeline_lib.config.content import Content
from pipeline_lib.config.exports import EXPORT_TYPES, FP8
from pipeline_lib.config.schema import Config
from pipeline_lib.config.spec_settings import (
    ADAPTER_PART,
    PARENT,
    PUSH,
    ROOT,
    benchmark_settings,
    download_settings,
    download_where,
    evaluate_settings,
    merge_settings,
    overlap_settings,
    plan_settings,
    push_settings,
    report_settings,
    shard_settings,
    tokenize_settings,
    unhashed_in,
)
from pipeline_lib.core.store import Spec
from pipeline_lib.core.units import count

# What a spec of a part holds, given the config and the hashes of the local files that it names.
Settings = Callable[[Config, Content, str], dict[str, Any]]
# What a spec of a part has in `where`: what is in no digest.
Unhashed = Callable[[Config, str], dict[str, Any]]
# What a stage instance does, given its parts: `model`, `data.0`.
Title = Callable[[Config, Sequence[str]], str]
# What a SLURM job with one task does, by which `slurm/sizing.py` computes its request.
JobKind = Literal["tokenize", "pack", "read", "load", "merge", "evaluate", "benchmark"]

# Jobs of these kinds open files of weights, on a GPU where there is one.
OPENS_WEIGHTS: frozenset[JobKind | None] = frozenset({"load", "merge", "evaluate", "benchmark"})

# of the formats, as their files say it
GGUF_VERSION = 3
FP8_FORMAT = "float-quantized"

# The part that is the evaluation of the base model, an instance of the stage `evaluate`.
BASELINE = "baseline"
# The part that is the last checkpoint's merge beside that of several, an instance of `merge`.
LAST_MERGE = "last_merge"
# The part that is the base model's scores, an instance of the stage `benchmark`.
BASE_BENCHMARK = "base_benchmark"


@dataclass(frozen=True)
class Product:
    """An end result: `results/NAME/LINK` leads to `file` of its sealed directory, or to all of it.

    Of a stage with several kinds of parts, each kind is a product and `link` is empty: the name of
    the kind stands for it.
    """

    link: str
    file: str = ""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage.

    `version` is raised by hand when the code begins to compute something else from the same
    settings. `module` has the function `run` that computes the stage, or of the training its
    `launcher`; only a process that runs it imports it. `parts` has the kinds of its instances in an
    experiment, each with the kinds of parts that it reads: `data` stands for `data.0`, `data.1` and
    so on, and a part that the experiment lacks is not read. `title` says what it does. `settings`
    is None for the training, which its plan describes. `job` is None for the download, which runs
    beside snakemake, and for the training, whose job has a task for each rank.
    """

    name: str
    version: int
    module: str
    parts: Mapping[str, tuple[str, ...]]
    title: Title
    settings: Settings | None = None
    unhashed: Unhashed | None = None
    job: JobKind | None = None
    product: Product | None = None


def _tokenize_title(config: Config, parts: Sequence[str]) -> str:
    sources = count(len(config.data.sources), "sources")
    return f"{sources}, up to {config.tokenize.max_tokens} tokens a sample"


def _shard_title(config: Config, parts: Sequence[str]) -> str:
    files = count(config.shard.shards, "files")
    return f"blocks of {config.shard.block_tokens} tokens in {files}"


def _plan_title(config: Config, parts: Sequence[str]) -> str:
    return count(config.cluster.ranks, f"{config.cluster.device} ranks")


def _train_title(config: Config, parts: Sequence[str]) -> str:
    where = _plan_title(config, parts)
    return f"{config.train.method} fine-tuning by {config.train.strategy} on {where}"


def _evaluate_title(config: Config, parts: Sequence[str]) -> str:
    has_held_out = bool(config.data.held_out_sources)
    if BASELINE in parts:
        return "base model on held-out answers" if has_held_out else "answers of the base model"
    return "base against tuned on held-out answers" if has_held_out else "answers of base and tuned"


def _merge_title(config: Config, parts: Sequence[str]) -> str:
    average = config.merge.average
    if average is not None and "merge" in parts:
        return f"mean of the last {average.last} checkpoints as a model folder, checked"
    return "model folder in Hugging Face format, checked against the trained model"


def _benchmark_title(config: Config, parts: Sequence[str]) -> str:
    model = "base model" if BASE_BENCHMARK in parts else "tuned model"
    return f"{model} on {', '.join(one.name for one in config.evaluate.benchmarks)}"


def _push_title(config: Config, parts: Sequence[str]) -> str:
    hubs = [part.removeprefix(PUSH) for part in parts]
    return f"model folder to {' and '.join(hubs)}"


def _export_title(config: Config, parts: Sequence[str]) -> str:
    return f"{', '.join(parts)} of the merged model, read back and compared with it"


def _export_settings(config: Config, content: Content, part: str) -> dict[str, Any]:
    return {"type": part, "format": FP8_FORMAT if part == FP8 else GGUF_VERSION}


def is_of_base(spec: Spec) -> bool:
    """Return whether `spec` is an evaluation of a base model by itself."""
    return spec.stage in ("evaluate", "benchmark") and "merge" not in spec.inputs


def shown_stage(spec: Spec) -> str:
    """Return the name of the stage of `spec`, or of the part if it is of a base model alone."""
    if not is_of_base(spec):
        return spec.stage
    return BASELINE if spec.stage == "evaluate" else BASE_BENCHMARK


_ROWS = (
    Stage(
        name="download",
        version=2,
        module="pipeline_lib.data.download",
        # The generation settings, of a local model only, are published with the result, without
        # effect on the training. A model that another experiment has trained reads its merge.
        parts={
            ROOT: (),
            "model": (),
            ADAPTER_PART: (),
            PARENT: (),
            "generation": (),
            "data": (),
            "questions": (),
        },
        title=lambda config, parts: ", ".join(parts),
        settings=download_settings,
        unhashed=download_where,
    ),
    Stage(
        name="tokenize",
        version=4,
        module="pipeline_lib.data.tokenize",
        parts={"tokenize": (ROOT, "model", "data")},
        title=_tokenize_title,
        settings=tokenize_settings,
        unhashed=lambda config, part: unhashed_in(config.tokenize),
        job="tokenize",
    ),
    Stage(
        name="shard",
        version=2,
        module="pipeline_lib.data.shard",
        parts={"shard": ("tokenize",)},
        title=_shard_title,
        settings=shard_settings,
        unhashed=lambda config, part: unhashed_in(config.shard),
        job="pack",
    ),
    Stage(
        name="plan",
        version=20,
        module="pipeline_lib.plan.stage",
        parts={"plan": (ROOT, "model", "tokenize", "shard")},
        title=_plan_title,
        settings=plan_settings,
        job="read",
    ),
    Stage(
        name="train",
        version=4,
        module="pipeline_lib.launch.stage",
        parts={"train": ("model", ADAPTER_PART, "shard")},
        title=_train_title,
    ),
    Stage(
        name="merge",
        version=4,
        module="pipeline_lib.export.merge",
        parts={
            LAST_MERGE: ("model", "generation", "train"),
            "merge": ("model", "generation", "train"),
        },
        title=_merge_title,
        settings=merge_settings,
        job="merge",
        product=Product("model"),
    ),
    Stage(
        name="export",
        version=1,
        module="pipeline_lib.export.stage",
        parts={kind: ("train", "merge") for kind in EXPORT_TYPES},
        title=_export_title,
        settings=_export_settings,
        job="merge",
        product=Product(""),
    ),
    Stage(
        name="evaluate",
        version=4,
        module="pipeline_lib.evaluate.stage",
        parts={
            # It depends on no training: experiments with the same model, data and settings share
            # it.
            BASELINE: ("model", PARENT, "generation", "tokenize", "shard"),
            "evaluate": (
                "model",
                PARENT,
                "generation",
                "tokenize",
                "shard",
                "merge",
                LAST_MERGE,
                BASELINE,
            ),
        },
        title=_evaluate_title,
        settings=evaluate_settings,
        job="evaluate",
    ),
    Stage(
        name="overlap",
        version=1,
        module="pipeline_lib.data.overlap",
        parts={"overlap": (ROOT, "model", "shard", "questions")},
        title=lambda *_: "which questions of benchmarks stand in the training rows",
        settings=overlap_settings,
        job="read",
    ),
    Stage(
        name="benchmark",
        version=1,
        module="pipeline_lib.evaluate.benchmark",
        parts={
            BASE_BENCHMARK: ("model", PARENT, "generation", "questions"),
            "benchmark": ("model", PARENT, "generation", "questions", "merge", BASE_BENCHMARK),
        },
        title=_benchmark_title,
        settings=benchmark_settings,
        job="benchmark",
    ),
    Stage(
        name="report",
        version=2,
        module="pipeline_lib.report.stage",
        parts={
            "report": (
                "model",
                ADAPTER_PART,
                "data",
                "tokenize",
                "shard",
                "train",
                "merge",
                BASELINE,
                "evaluate",
                "overlap",
                BASE_BENCHMARK,
                "benchmark",
            )
        },
        title=lambda *_: "one page with everything",
        settings=report_settings,
        job="read",
        product=Product("report.html", "report.html"),
    ),
    Stage(
        name="push",
        version=1,
        module="pipeline_lib.export.push",
        parts={
            "push_huggingface": ("merge", "benchmark"),
            "push_modelscope": ("merge", "benchmark"),
        },
        title=_push_title,
        settings=push_settings,
        job="read",
        product=Product("", "pushed.json"),
    ),
)
STAGES: dict[str, Stage] = {row.name: row for row in _ROWS}
_STAGE_OF = {kind: row.name for row in _ROWS for kind in row.parts}
_PLACES = {kind: place for place, kind in enumerate(_STAGE_OF)}


def _products() -> dict[str, Product]:
    found = {}
    for row in reversed(_ROWS):
        if row.product is not None:
            kinds = [
                kind for kind in row.parts if kind != LAST_MERGE
            ]  # only the evaluation reads it
            for kind in kinds:
                found[kind] = replace(row.product, link=row.product.link or kind)
    return found


# The end results that an experiment may have, by part, the last first.
PRODUCTS = _products()


def kind_of(part: str) -> str:
    """Return the kind of a part: `data` of `data.1`, else its name."""
    return part.partition(".")[0]


def stage_of(part: str) -> str:
    """Return the name of the stage of which `part` is an instance; of an unknown part, its kind."""
    kind = kind_of(part)
    return _STAGE_OF.get(kind, kind)


def place_of(part: str) -> tuple[int, int]:
    """Return the sort key of `part` in the order of the stages; unknown parts are the last."""
    number = part.partition(".")[2]
    place = _PLACES.get(kind_of(part), len(_PLACES))
    return place, int(number) if number.isdecimal() else 0


def onwards(first: str) -> tuple[str, ...]:
    """Return the stage `first` and all that read its result, directly or not, in order."""
    found = [first]
    for row in _ROWS:
        read = chain.from_iterable(row.parts.values())
        is_made_from_them = any(stage_of(kind) in found for kind in read)
        if is_made_from_them and row.name not in found:
            found.append(row.name)
    return tuple(found)
