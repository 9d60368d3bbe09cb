"""The figures in the headers of config/recipes/*.yaml and in docs/recipes.md, made from the plan.

They depend on the recipe alone: not on data, on the store, or on the libraries and the disk of this
machine.
"""

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline_lib.arch.families import geometry_in, published
from pipeline_lib.arch.geometry import Geometry
from pipeline_lib.config.load import load_configs
from pipeline_lib.config.schema import Config, HubModel
from pipeline_lib.config.train import fixed_keys
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.core.units import HOUR_S, brief, gib, gigabytes, gpu_hours
from pipeline_lib.plan.answer import Question, answer
from pipeline_lib.plan.machine import Machine
from pipeline_lib.plan.one_node import way_on_one_node
from pipeline_lib.plan.predict import Prediction, host_bytes_of_node
from pipeline_lib.plan.show import banded
from pipeline_lib.plan.trained import checkpoint_bytes
from pipeline_lib.plan.words import describe
from pipeline_lib.plan.workload import assumed_workload
from pipeline_lib.records.plan import Figure

RECIPES = Path("config/recipes")
PAGE = Path("docs/recipes.md")
# of data, for which hours are stated: the number of steps depends on the user's data
TOKENS = 100_000_000
TOKENS_IN_WORDS = "100 million tokens"

BEGIN, END = (
    "# ---- begin: from the plan, written by `make docs` ----",
    "# ---- end: from the plan ----",
)
_PAGE_BEGIN = "<!-- begin: from the plan, written by `make docs` -->"
_PAGE_END = "<!-- end: from the plan -->"
_HEADS = (
    "recipe",
    "machine",
    "model",
    "method",
    "strategy",
    "memory per GPU",
    "tokens/s per GPU",
    "hours",
    "disk",
)
_WIDTH, _NAMES = 112, 14


@dataclass(frozen=True)
class Recipe:
    """A recipe and its plan; of a sweep, the plan of its first experiment.

    `alone` is the plan for one of its nodes.
    """

    path: Path
    config: Config
    experiments: int
    geometry: Geometry
    machine: Machine
    way: Prediction
    alone: Prediction | None

    @property
    def tokens_per_s(self) -> Figure:
        """Predicted tokens/s of all GPUs together, without padding."""
        return self.way.tokens_per_s_per_rank.scaled(self.config.cluster.ranks)

    @property
    def duration_s(self) -> Figure:
        """Predicted seconds of the training steps for TOKENS tokens."""
        return self.tokens_per_s.inverse(TOKENS)

    @property
    def machine_text(self) -> str:
        """The machine, such as `2 nodes x 8 A100 80GB SXM`."""
        machine = self.machine
        nodes = f"{machine.nodes} nodes x " if machine.nodes > 1 else ""
        return f"{nodes}{machine.ranks_per_node} x {machine.name}"

    @property
    def disk_bytes(self) -> int:
        """Bytes of the checkpoints that are kept and of the one that is being written."""
        train = self.config.train
        return checkpoint_bytes(self.geometry, train) * train.checkpoints_on_disk

    @property
    def model_name(self) -> str:
        """The name of the model on its hub."""
        return _hub_model(self.path, self.config).name


def find_recipes(root: Path) -> list[Recipe]:
    """Return the recipes below `root`, sorted by name."""
    return [read_recipe(path) for path in sorted((root / RECIPES).glob("*.yaml"))]


def read_recipe(path: Path) -> Recipe:
    """Return the recipe at `path` with its plan. Raise ConfigError if it cannot be trained."""
    configs = load_configs(path)
    config = configs[0]
    table = published(_hub_model(path, config).name)
    if table is None:
        raise ConfigError(str(path), ["model.name: the plan has no table of this model"])
    geometry = geometry_in(table)
    question = Question(
        experiment=config.experiment,
        geometry=geometry,
        train=config.train,
        cluster=config.cluster,
        tracking=config.tracking,
        workload=assumed_workload(config),
        blocks=None,
        fixed=fixed_keys(config.train),
        measured=None,
        # otherwise its strategies depend on an optional library
        has_deepspeed=config.train.uses_deepspeed,
    )
    machine = question.machine
    found = answer(question, is_explained=False)
    if machine is None or found.choice is None:
        raise ConfigError(str(path), ["cluster.gpu: a recipe names its GPUs"])
    way = found.choice.chosen
    if found.refusal is not None or not way.fits:
        raise ConfigError(str(path), [found.refusal or "train.strategy: does not fit"])
    alone = way_on_one_node(config, question) if config.cluster.nodes > 1 else None
    return Recipe(path, config, len(configs), geometry, machine, way, alone)


def _hub_model(path: Path, config: Config) -> HubModel:
    if not isinstance(config.model, HubModel):
        raise ConfigError(str(path), ["model.source: a recipe names a model of a hub"])
    return config.model


def with_header(text: str, recipe: Recipe) -> str:
    """Return a recipe file's content, `text`, with present figures between its markers."""
    lines = [line for name, value in _rows(recipe) for line in _wrapped(name, value)]
    return _between(text, (BEGIN, END), lines, recipe.path)


def with_table(text: str, recipes: Sequence[Recipe]) -> str:
    """Return the content of docs/recipes.md, `text`, with the present table between its markers."""
    rows = [_HEADS, ("---",) * len(_HEADS), *map(_cells, recipes)]
    return _between(
        text, (_PAGE_BEGIN, _PAGE_END), [f"| {' | '.join(row)} |" for row in rows], PAGE
    )


def recipe_files(root: Path) -> dict[Path, str]:
    """Return the files below `root` with figures of recipes, and the content each ought to have."""
    recipes = find_recipes(root)
    found = {
        recipe.path: with_header(recipe.path.read_text(encoding="utf-8"), recipe)
        for recipe in recipes
    }
    page = root / PAGE
    return found | {page: with_table(page.read_text(encoding="utf-8"), recipes)}


def _rows(recipe: Recipe) -> Iterator[tuple[str, str]]:
    way = recipe.way
    machine = recipe.machine
    train = recipe.config.train
    trained = "all trained"
    if train.method == "lora":
        trained = f"{recipe.geometry.trained_parameters(train):,} trained in adapters"
    workload = assumed_workload(recipe.config)
    step_tokens = (
        train.batch_blocks(workload.block_tokens, workload.samples_per_block)
        * workload.block_tokens
    )
    yield "machine", recipe.machine_text
    yield "model", f"{recipe.model_name}, {recipe.geometry.parameters:,} parameters, {trained}"
    yield "strategy", describe(way)
    yield (
        "GPU memory",
        f"{_banded(way.needed_memory_bytes, gib)} of {gib(machine.gpu_memory_bytes)} per GPU",
    )
    yield "host memory", f"{gigabytes(host_bytes_of_node(way.memory, machine))} on each node"
    yield "step time", f"{_banded(way.step_s, brief)} for {step_tokens:,} tokens, padding included"
    in_all = f", {_speed(recipe.tokens_per_s)} in all" if recipe.config.cluster.ranks > 1 else ""
    yield "speed", f"{_speed(way.tokens_per_s_per_rank)} per GPU{in_all}; padding not counted"
    hours = _banded(recipe.duration_s.scaled(recipe.config.cluster.ranks / HOUR_S), gpu_hours)
    took = _banded(recipe.duration_s, brief)
    yield "time", f"{took} for {TOKENS_IN_WORDS}, {hours}; optimizer steps only"
    if recipe.experiments > 1:
        yield (
            "experiments",
            f"{recipe.experiments}; the figures are for one of them, trained to its end",
        )
    each = gigabytes(way.checkpoint_bytes)
    yield "disk", f"{gigabytes(recipe.disk_bytes)} for checkpoints of {each}: {train.kept_in_words}"
    if machine.nodes > 1:
        yield "one node", _one_node(recipe)


def _one_node(recipe: Recipe) -> str:
    """Return how one node alone compares, in words."""
    if recipe.alone is None:
        return "this training does not fit on one of these nodes"
    host = host_bytes_of_node(recipe.alone.memory, replace(recipe.machine, nodes=1))
    speed = recipe.alone.tokens_per_s_per_rank.scaled(recipe.machine.ranks_per_node)
    return (
        f"the same training on one of these nodes: {describe(recipe.alone)}; {_speed(speed)} in "
        f"all, {_banded(speed.inverse(TOKENS), brief)} for {TOKENS_IN_WORDS}, {gigabytes(host)} of "
        "host memory"
    )


def _banded(figure: Figure, show: Callable[[float], str]) -> str:
    return banded(figure, show)


def _speed(figure: Figure) -> str:
    return _banded(figure, lambda each: f"{each:,.0f} tokens/s")


def _cells(recipe: Recipe) -> tuple[str, ...]:
    way = recipe.way
    name = recipe.path.name
    return (
        f"[{name}](../{RECIPES}/{name})",
        recipe.machine_text,
        recipe.model_name.partition("/")[2],
        recipe.config.train.method,
        describe(way),
        _banded(way.needed_memory_bytes, gib),
        f"{way.tokens_per_s_per_rank.value:,.0f}",
        f"{recipe.duration_s.value / HOUR_S:,.1f}",
        gigabytes(recipe.disk_bytes),
    )


def _wrapped(name: str, value: str) -> list[str]:
    first = f"# {name:<{_NAMES}}"
    rest = "# " + " " * _NAMES
    return textwrap.wrap(
        value, _WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    )


def _between(text: str, markers: tuple[str, str], lines: Iterable[str], path: Path) -> str:
    """Return `text` with `lines` between the two marker lines.

    Raise ConfigError if it lacks them.
    """
    found, (begin, end) = text.splitlines(), markers
    if found.count(begin) != 1 or found.count(end) != 1 or found.index(begin) > found.index(end):
        raise ConfigError(
            str(path), [f"needs the two lines {begin!r} and {end!r}, once and in this order"]
        )
    kept_before = found[: found.index(begin) + 1]
    kept_after = found[found.index(end) :]
    return "\n".join([*kept_before, *lines, *kept_after]) + "\n"
