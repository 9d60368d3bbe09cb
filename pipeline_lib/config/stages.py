"""The stages, one row each: everything that goes through all stages reads this table.

The compiler, the command line, Snakemake's titles and targets, the requests of SLURM jobs, the
lineage, the report, comparisons and the removal of garbage do. The order of the rows is the order
of the stages: each reads parts of rows above it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from pipeline_lib.config.content import Content
from pipeline_lib.config.schema import Config
from pipeline_lib.config.section import settings_of
from pipeline_lib.config.spec_settings import (
    download_settings,
    download_where,
    evaluate_settings,
    plan_settings,
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
JobKind = Literal["tokenize", "pack", "read", "load", "merge", "evaluate"]

# Jobs of these kinds open files of weights, on a GPU where there is one.
OPENS_WEIGHTS: frozenset[JobKind | None] = frozenset({"load", "merge", "evaluate"})

# The part that is the evaluation of the base model, an instance of the stage `evaluate`.
BASELINE = "baseline"


@dataclass(frozen=True)
class Product:
    """An end result: `results/NAME/LINK` leads to `file` of its sealed directory, or to all of it."""

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


def is_of_base(spec: Spec) -> bool:
    """Return whether `spec` is the evaluation of a base model by itself."""
    return spec.stage == "evaluate" and "merge" not in spec.inputs


_ROWS = (
    Stage(
        name="download",
        version=2,
        module="pipeline_lib.data.download",
        # The generation settings, of a local model only, are published with the result, without
        # effect on the training.
        parts={"model": (), "generation": (), "data": ()},
        title=lambda config, parts: ", ".join(parts),
        settings=download_settings,
        unhashed=download_where,
    ),
    Stage(
        name="tokenize",
        version=4,
        module="pipeline_lib.data.tokenize",
        parts={"tokenize": ("model", "data")},
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
        version=19,
        module="pipeline_lib.plan.stage",
        parts={"plan": ("model", "tokenize", "shard")},
        title=_plan_title,
        settings=plan_settings,
        job="read",
    ),
    Stage(
        name="train",
        version=4,
        module="pipeline_lib.launch.stage",
        parts={"train": ("model", "shard")},
        title=_train_title,
    ),
    Stage(
        name="merge",
        version=4,
        module="pipeline_lib.export.merge",
        parts={"merge": ("model", "generation", "train")},
        title=lambda *_: "model folder in Hugging Face format, checked against the trained model",
        settings=lambda config, content, part: settings_of(config.merge),
        job="merge",
        product=Product("model"),
    ),
    Stage(
        name="evaluate",
        version=4,
        module="pipeline_lib.evaluate.stage",
        parts={
            # It depends on no training: experiments with the same model, data and settings share
            # it.
            BASELINE: ("model", "generation", "tokenize", "shard"),
            "evaluate": ("model", "generation", "tokenize", "shard", "merge", BASELINE),
        },
        title=_evaluate_title,
        settings=evaluate_settings,
        job="evaluate",
    ),
    Stage(
        name="report",
        version=2,
        module="pipeline_lib.report.stage",
        parts={
            "report": ("model", "data", "tokenize", "shard", "train", "merge", BASELINE, "evaluate")
        },
        title=lambda *_: "one page with everything",
        settings=lambda config, content, part: {
            "experiment": config.experiment,
            **settings_of(config.report),
        },
        job="read",
        product=Product("report.html", "report.html"),
    ),
)
STAGES: dict[str, Stage] = {row.name: row for row in _ROWS}
# The end results of an experiment by part, the last first.
PRODUCTS = {row.name: row.product for row in reversed(_ROWS) if row.product is not None}
_STAGE_OF = {kind: row.name for row in _ROWS for kind in row.parts}
_PLACES = {kind: place for place, kind in enumerate(_STAGE_OF)}


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
