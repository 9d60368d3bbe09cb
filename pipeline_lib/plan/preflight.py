"""What cannot be, said before any job is submitted: in `snakemake -n`, and in `python -m pipeline_lib check`.

Costs milliseconds, loads nothing heavy, and is silent about what is not known yet; the plan stage looks again.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from shutil import disk_usage

from pipeline_lib.base.errors import ConfigError, DataError
from pipeline_lib.base.fsio import list_files
from pipeline_lib.base.run_folder import CHECKPOINTS
from pipeline_lib.base.spec import Spec
from pipeline_lib.base.store import Store
from pipeline_lib.config.compile import held_keys, run_digest
from pipeline_lib.config.content import missing_model_files, model_files, model_key
from pipeline_lib.config.cross_check import cross_check
from pipeline_lib.config.schema import Config, Train
from pipeline_lib.config.sources import LocalModel
from pipeline_lib.plan.checkpoints import checkpoint_bytes
from pipeline_lib.plan.choice import Setting
from pipeline_lib.plan.cluster import machine_of
from pipeline_lib.plan.document import in_lines, is_hopeless, lacking
from pipeline_lib.plan.feasible import Wanted, leanest, no_way, what_would_fit
from pipeline_lib.plan.geometry import Geometry
from pipeline_lib.plan.known import find_geometry, is_sealed, remembered_specs
from pipeline_lib.plan.machine import Machine
from pipeline_lib.plan.measured import measured_of
from pipeline_lib.plan.units import gigabytes
from pipeline_lib.plan.workload import Workload


def refuse_impossible(config: Config, store: Store) -> None:
    """Raise ConfigError with all reasons why the training of `config` cannot be.

    None for one that was done already, as far as the store remembers what it is made from.
    """
    _refuse(config, store, lambda known: [*known.wrong, *_of_training(config, known, store)])


def refuse_wrong(config: Config, store: Store) -> None:
    """The same with what is wrong in any case, so that there is nothing to make and nothing to plan."""
    _refuse(config, store, lambda known: known.wrong)


def refuse_too_large(config: Config, store: Store) -> None:
    """The same with what the training alone needs, memory and disk: data may be made of it, and it may be planned."""
    _refuse(config, store, lambda known: list(_of_training(config, known, store)))


@dataclass(frozen=True)
class _Known:
    """What there is to go by, as far as it is known, and what is wrong with it."""

    machine: Machine | None
    geometry: Geometry | None
    wrong: list[str]


def _refuse(config: Config, store: Store, problems_of: Callable[[_Known], list[str]]) -> None:
    if not is_sealed(config, store, "train"):
        problems = problems_of(_known(config, store))
    elif not is_sealed(config, store, "merge"):
        problems = _of_model(config, is_trained=True)
    else:
        problems = []
    if problems:
        raise ConfigError(f"experiment {config.experiment!r}", problems)


def _of_model(config: Config, is_trained: bool) -> list[str]:
    """What is wrong with the files of a local model; of one `is_trained`, with those that are still to be read."""
    if not isinstance(config.model, LocalModel):
        return []
    folder = Path(config.model.path)
    if missing_model_files(file.name for file in model_files(folder)):
        return []
    from pipeline_lib.model.folder import generation_problems, problems_of  # loads the tokenizer's library, and numpy

    found = generation_problems(folder) if is_trained else problems_of(folder)
    return [f"{model_key(config.model)}: {problem}" for problem in found]


def _known(config: Config, store: Store) -> _Known:
    machine, geometry, wrong = None, None, []
    try:
        machine = machine_of(config.cluster, config.train.precision, measured_of(config))
    except ConfigError as error:
        wrong += [text if "." in text.partition(":")[0] else f"{error.source}: {text}" for text in error.problems]
    try:
        geometry = find_geometry(config, store)
    except (DataError, OSError) as error:
        wrong.append(f"{model_key(config.model)}: {error}")
    wrong += [problem for problem in _of_model(config, is_trained=False) if problem not in wrong]
    if geometry is not None:
        wrong += [*geometry.too_long(config.shard.block_tokens), *geometry.rank_too_high(config.train)]
        try:
            geometry.trained_parameters(config.train)
        except DataError as error:
            wrong.append(str(error))
            geometry = None
    return _Known(machine, geometry, wrong)


def _of_training(config: Config, known: _Known, store: Store) -> Iterator[str]:
    yield from _not_installed(config.train)
    if cross_check(config):  # what its keys come to is not known
        return
    geometry, machine = known.geometry, known.machine
    if geometry is None:
        return
    needed = checkpoint_bytes(geometry, config.train) * (config.train.keep_last + config.train.keep_best + 1)
    yield from too_little_disk(needed, config, store)
    if machine is None:
        return
    batch_blocks = config.train.global_batch_tokens // config.shard.block_tokens
    setting = Setting(geometry, machine, Workload.assumed(config), batch_blocks, None)
    wanted = Wanted(setting, config.train, held_keys(config.train), find_spec("deepspeed") is not None)
    if problem := no_way(wanted):
        yield problem
        return
    if wanted.fits:
        return
    train, memory = leanest(wanted)[0]
    if config.train.strategy == "auto":
        least = lacking(train, memory, machine).removeprefix("train.strategy: ")
        yield in_lines([f"train.strategy: auto finds no way that fits: at the least, {least}", *what_would_fit(wanted)])
    elif is_hopeless(memory, machine):
        yield in_lines([lacking(train, memory, machine), *what_would_fit(wanted)])


def _not_installed(train: Train) -> Iterator[str]:
    """Libraries that the training would import and that are not here: those of some settings come by extras."""
    needed = (
        (train.uses_deepspeed, f"train.strategy: {train.strategy}", "DeepSpeed", "deepspeed"),
        (train.precision == "fp8", "train.precision: fp8", "torchao", "fp8"),
        (train.optimizer == "adamw_8bit", "train.optimizer: adamw_8bit", "torchao", "optim8bit"),
    )
    for is_needed, setting, library, extra in needed:
        if is_needed and find_spec(library.lower()) is None:
            yield f"{setting} needs {library}, which is not installed here: pip install 'qwen3-pipeline[{extra}]'"


def too_little_disk(needed_bytes: int, config: Config, store: Store) -> Iterator[str]:
    """The problem of checkpoints that are more than the store's disk has room for, if they are.

    Those that lie there already are not counted again.
    """
    specs = remembered_specs(config, store)
    if problem := no_room(needed_bytes, specs["train"] if specs else None, store):
        yield f"train.keep_last: {problem}"


def no_room(needed_bytes: int, training: Spec | None, store: Store) -> str | None:
    """Why the store's disk has no room for so many bytes of checkpoints of `training`; None if it has.

    What a run has written already is not counted again: those that follow replace it.
    """
    folder = store.run_dir(run_digest(training)) / CHECKPOINTS if training else None
    there = sum((folder / name).stat().st_size for name in list_files(folder)) if folder and folder.exists() else 0
    where = next(path for path in (store.root.absolute(), *store.root.absolute().parents) if path.exists())
    free = disk_usage(where).free
    if needed_bytes <= free + there:
        return None
    beside = f" beside {gigabytes(there)} of them that lie there" if there else ""
    return (
        f"the checkpoints kept and the one being written need {gigabytes(needed_bytes)}, and {gigabytes(free)} are "
        f"free in {where}{beside}; free some space, or point PIPELINE_STORE at a larger disk"
    )
