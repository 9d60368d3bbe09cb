"""Check before any job is submitted whether a config can work at all."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from shutil import disk_usage

from pipeline_lib.arch.families import PLANNED, SUPPORTED
from pipeline_lib.arch.geometry import Geometry
from pipeline_lib.arch.peft_adapter import differences, read_adapter_config, unusable
from pipeline_lib.config.checks import cross_check
from pipeline_lib.config.compile import run_digest
from pipeline_lib.config.content import (
    ADAPTER_CONFIG,
    data_files,
    is_data_file,
    missing_model_files,
    model_files,
    model_key,
)
from pipeline_lib.config.findings import Finding, refusals
from pipeline_lib.config.optimizers import OPTIMIZERS
from pipeline_lib.config.schema import (
    Config,
    ExperimentModel,
    FileData,
    HubData,
    HubModel,
    LocalAdapter,
    LocalModel,
    TinyModel,
    Tokenize,
)
from pipeline_lib.config.section import settings_of
from pipeline_lib.config.train import AUTO, Train, fixed_keys
from pipeline_lib.core.errors import ConfigError, DataError
from pipeline_lib.core.files import is_linkable, list_files, nearest_existing
from pipeline_lib.core.run_folder import CHECKPOINTS
from pipeline_lib.core.store import Spec, Store
from pipeline_lib.core.text import how_to_install
from pipeline_lib.core.units import gigabytes
from pipeline_lib.data.first_rows import first_row
from pipeline_lib.hub.snapshot import is_edited_by_nobody
from pipeline_lib.plan.amounts import expected_workload
from pipeline_lib.plan.answer import in_lines, is_hopeless, lacking, lacking_at_least
from pipeline_lib.plan.case import Case
from pipeline_lib.plan.choose import leanest, no_way
from pipeline_lib.plan.cluster import machine_of
from pipeline_lib.plan.context import not_shared, sharing_counts
from pipeline_lib.plan.fitting import what_would_fit
from pipeline_lib.plan.known import (
    find_geometry,
    is_sealed,
    losses_of,
    remembered_specs,
)
from pipeline_lib.plan.machine import Machine, Ranks
from pipeline_lib.plan.measured import measured_of
from pipeline_lib.plan.predict import fits, lacks_host_memory
from pipeline_lib.plan.stages import Run, later_problems, run_of_config, stored_bytes

# Refusals before any job is submitted: in `snakemake -n`, and in `qwen3 check`.
#
# They load nothing heavy, and pass over what is not known yet; the plan stage checks again.


PLANNED_ONLY = (
    f"models of type {' and '.join(PLANNED)} are planned here, and only "
    f"{', '.join(SUPPORTED)} are trained"
)
_LOOKED_AT_FILES = 100  # of a source, so that `check` stays fast on slow disks


def wrong_with(config: Config, store: Store) -> list[Finding]:
    """Return the refusals of what is wrong in any case, so that no data or plan can be made.

    That includes what the first rows of local files show. If the store remembers a sealed training,
    only the model files that later stages read are looked at, and none once the merged model is
    sealed.
    """
    problems: list[str] = []
    if not is_sealed(config, store, "train"):
        known = _known(config, store, _of_model(config, is_trained=False))
        problems = [*known.wrong, *_of_adapter(config), *_of_data(config, store)]
    elif not is_sealed(config, store, "merge"):
        problems = _of_model(config, is_trained=True)
    return refusals([*problems, *losses_of(config, store)])


def lacking_to_train(config: Config, store: Store) -> list[Finding]:
    """Return the refusals of what only the training lacks: memory, disk, or libraries.

    The data and the plan may be made without it.
    """
    if is_sealed(config, store, "train"):
        return []
    return refusals(_of_training(config, _known(config, store, []), store))


@dataclass(frozen=True)
class _Known:
    machine: Machine | None
    geometry: Geometry | None
    wrong: list[str]


def _of_model(config: Config, is_trained: bool) -> list[str]:
    """Return a local model's problems; if it `is_trained`, only of files still to be read."""
    if not isinstance(config.model, LocalModel):
        return []
    folder = Path(config.model.path)
    if not folder.is_dir() or missing_model_files(file.name for file in model_files(folder)):
        return []  # named where the files are hashed
    # Imported here because it loads the tokenizer's library, and numpy.
    from pipeline_lib.data.model_folder import generation_problems, problems_of

    found = generation_problems(folder) if is_trained else problems_of(folder)
    return [f"{model_key(config.model)}: {problem}" for problem in found]


def _of_adapter(config: Config) -> Iterator[str]:
    """Yield what is wrong with adapters in a local folder that the training goes on from."""
    adapter = config.starting_adapter
    if not isinstance(adapter, LocalAdapter) or not Path(adapter.path, ADAPTER_CONFIG).is_file():
        return  # a missing one is named where the files are hashed
    try:
        described = read_adapter_config(Path(adapter.path))
    except DataError as error:
        yield f"model.adapter.path: {error}"
        return
    base = config.model.name if isinstance(config.model, HubModel) else None
    for problem in unusable(described, base):
        yield f"model.adapter.path: {problem}"
    for key, value in differences(described, config.train.lora):
        own = getattr(config.train.lora, key)
        yield f"train.lora.{key}: {own}, and the adapters in {adapter.path} have {value}; write that"


def _known(config: Config, store: Store, of_model: list[str]) -> _Known:
    """Return what is known of machine and model; `of_model` is what is wrong with its files."""
    machine, geometry, wrong = None, None, []
    try:
        train = config.train
        machine = machine_of(config.cluster, train.precision, measured_of(config), train.attention)
    except ConfigError as error:
        wrong += [
            text if "." in text.partition(":")[0] else f"{error.source}: {text}"
            for text in error.problems
        ]
    try:
        geometry = find_geometry(config, store)
    except (DataError, OSError) as error:
        wrong.append(f"{model_key(config.model)}: {error}")
    wrong += [problem for problem in of_model if problem not in wrong]
    if geometry is not None and not geometry.is_trained:
        if not of_model:  # else they say it
            wrong.append(f"{model_key(config.model)}: {PLANNED_ONLY}")
        geometry = None
    if geometry is not None:
        wrong += geometry.problems(config.train, config.shard.block_tokens)
        try:
            geometry.trained_parameters(config.train)
        except DataError as error:
            wrong.append(str(error))
            geometry = None
    return _Known(machine, geometry, wrong)


def _of_data(config: Config, store: Store) -> Iterator[str]:
    """Yield why the data cannot be tokenized, by local files' first rows, unless it is already."""
    if is_sealed(config, store, "tokenize"):
        return
    formats: set[str | None] = set()
    for number, source in enumerate(config.data.sources):
        if not isinstance(source, FileData):
            formats.add(source.format if isinstance(source, HubData) else "messages")
            continue
        try:
            files = [
                file for file in data_files(source.path, source.split) if is_data_file(file.name)
            ]
            for file in files[: 1 if source.max_rows else _LOOKED_AT_FILES]:
                may_be_bad = config.tokenize.max_quarantined_fraction > 0
                row = first_row(file, source, may_be_bad=may_be_bad)
                formats.add(row.format)
                if row.problem:
                    yield f"{config.data.key_of(number)}.path: {row.problem}"
        except (DataError, OSError):  # named where the files are hashed
            continue
    if formats - {"text", "auto", None}:
        yield from _of_template(config)
    elif formats == {"text"}:
        yield from _of_text(config.tokenize, has_prompts=bool(config.evaluate.prompts))


def _of_text(tokenize: Tokenize, *, has_prompts: bool) -> Iterator[str]:
    """Yield the keys without effect on raw text; some are for the evaluation's prompts, too."""
    of_prompts = {"system", "tools", "chat_template_kwargs"} if has_prompts else set()
    for key in (
        "system",
        "tools",
        "chat_template_kwargs",
        "thinking",
        "prompt_thinking",
        "train_on",
    ):
        if key in settings_of(tokenize) and key not in of_prompts:
            yield f"tokenize.{key}: has no effect, because all rows are raw text; remove it"


def _of_template(config: Config) -> Iterator[str]:
    """Yield what conversations lack in the chat template, if the model's files are on this machine.

    It has to be there, and to render the system message and the tools of the config.
    """
    from pipeline_lib.data.chat_template import has_template, no_template

    model = config.root.model
    path: str | None = None
    if isinstance(model, LocalModel):
        path = model.path
    elif isinstance(model, TinyModel):
        path = model.tokenizer
    if path is None or not Path(path).is_dir():
        return
    try:
        is_there = has_template(Path(path))
    except DataError:  # a file that cannot be read is named where the model is looked at
        return
    if not is_there:
        yield f"{model_key(model)}: {no_template(Path(path))}"
    elif config.tokenize.system or config.tokenize.tools:
        from pipeline_lib.data.template_worker import refuse_unrendered_defaults

        try:
            refuse_unrendered_defaults(Path(path), config.tokenize)
        except DataError as error:
            yield str(error)


def _of_training(config: Config, known: _Known, store: Store) -> Iterator[str]:
    geometry = known.geometry
    machine = known.machine
    is_recurrent = (
        geometry is not None
        and geometry.delta is not None
        and machine is not None
        and machine.is_gpu
    )
    yield from _not_installed(config.train, is_recurrent)
    if cross_check(config):  # keys contradict each other, so what follows from them is undefined
        return
    if geometry is None:
        return
    workload = expected_workload(config, geometry.vocab)
    run = run_of_config(config, geometry, workload, machine)
    yield from too_little_disk(run, config, store)
    batch_blocks = config.train.batch_blocks(workload.block_tokens, workload.samples_per_block)
    fixed = fixed_keys(config.train)
    ranks = Ranks.of_cluster(config.cluster)
    sizes = (workload.block_tokens, batch_blocks)
    if not sharing_counts(geometry, config.train, fixed, ranks, *sizes):
        yield not_shared(config.train, ranks.total, *sizes)
        return
    if machine is None:
        return
    has_deepspeed = find_spec("deepspeed") is not None
    case = Case(
        geometry,
        config.train,
        machine,
        workload,
        batch_blocks,
        fixed=fixed,
        has_deepspeed=has_deepspeed,
    )
    way = leanest(case)
    if way is None:
        yield no_way(case)
        return
    train, memory = way
    if fits(memory, machine):
        yield from later_problems(run)
        return
    if not lacks_host_memory(memory, machine):  # else the training needs more than they do
        yield from later_problems(run)
    if config.train.strategy == AUTO:
        yield in_lines([lacking_at_least(train, memory, machine), *what_would_fit(case)])
    elif is_hopeless(memory, machine):
        yield in_lines([lacking(train, memory, machine), *what_would_fit(case)])


_MODULES = {"fla-core": "fla"}  # of libraries that are imported by another name


def _not_installed(train: Train, is_recurrent: bool) -> Iterator[str]:
    """Yield uninstalled libraries that the training would import; some settings need extras.

    `is_recurrent` means layers with a gated delta rule on GPUs.
    """
    needed = [
        (train.uses_deepspeed, f"train.strategy: {train.strategy}", "DeepSpeed", "deepspeed"),
        (train.precision == "fp8", "train.precision: fp8", "torchao", "fp8"),
        (train.lora.base == "nf4", "train.lora.base: nf4", "bitsandbytes", "nf4"),
        (is_recurrent, "model: its gated delta rule on GPUs", "fla-core", "delta"),
    ]
    of_optimizer = OPTIMIZERS[train.optimizer].extra
    if of_optimizer:
        chosen = f"train.optimizer: {train.optimizer}"
        needed.append((True, chosen, of_optimizer.library, of_optimizer.name))
    for is_needed, setting, library, extra in needed:
        if is_needed and find_spec(_MODULES.get(library, library.lower())) is None:
            yield f"{setting} needs {library}, which is not installed here: {how_to_install(extra)}"


def too_little_disk(run: Run, config: Config, store: Store) -> Iterator[str]:
    """Yield a problem if the store's disk has no room for checkpoints, or for all of a run.

    Checkpoints and a base model that the store has already are not counted again, nor weights that
    it will link.
    """
    specs = remembered_specs(config, store)
    training = specs["train"] if specs else None
    is_there = bool(specs and store.is_sealed(specs["model"].ref)) or _is_linked(
        config.model, store
    )
    if problem := no_room(stored_bytes(run, is_there), training, store):
        yield problem


def _is_linked(model: object, store: Store) -> bool:
    """Return whether the store gets links to the weights of `model`, and no copy."""
    if isinstance(model, ExperimentModel):
        return True
    if not isinstance(model, LocalModel) or not Path(model.path).is_dir():
        return False
    weights = [file for file in model_files(Path(model.path)) if file.suffix == ".safetensors"]
    place = nearest_existing(store.root)
    return bool(weights) and all(
        is_edited_by_nobody(file, store.root) and is_linkable(file, place) for file in weights
    )


def no_room(sizes: Mapping[str, int], training: Spec | None, store: Store) -> str | None:
    """Return why the store's disk has no room for the `sizes` that `training` writes, or None.

    `sizes` has bytes by name, those of the checkpoints too. Checkpoints that the run has written
    already are not counted again, because later ones replace them.
    """
    folder = store.run_dir(run_digest(training)) / CHECKPOINTS if training else None
    there = (
        sum((folder / name).stat().st_size for name in list_files(folder))
        if folder and folder.exists()
        else 0
    )
    where = nearest_existing(store.root)
    free = disk_usage(where).free
    beside = f" beside {gigabytes(there)} of them that lie there" if there else ""
    checkpoints = sizes["checkpoints"]
    remedy = "free some space, or point PIPELINE_STORE at a larger disk"
    if checkpoints > free + there:
        return (
            "train.keep_last: the checkpoints kept and the one being written need "
            f"{gigabytes(checkpoints)}, and {gigabytes(free)} are free in {where}{beside}; {remedy}"
        )
    total = sum(sizes.values())
    if total <= free + there:
        return None
    parts = ", ".join(f"{name} {gigabytes(size)}" for name, size in sizes.items() if size)
    return (
        f"the run writes {gigabytes(total)} ({parts}), and {gigabytes(free)} are free in "
        f"{where}{beside}; {remedy}"
    )
