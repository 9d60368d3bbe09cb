"""Check before any job is submitted whether a config can work at all, and show what it will take."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from shutil import disk_usage

from pipeline_lib.config.checks import cross_check, warnings_of
from pipeline_lib.config.compile import held_keys, run_digest
from pipeline_lib.config.content import (
    data_files,
    is_data_file,
    missing_model_files,
    model_files,
    model_key,
)
from pipeline_lib.config.dag import RESULTS
from pipeline_lib.config.load import FLAG, load_config, load_configs
from pipeline_lib.config.schema import Config, FileData, HubData, LocalModel, TinyModel
from pipeline_lib.config.sweep import collapsed
from pipeline_lib.config.train import AUTO, Train
from pipeline_lib.core.errors import ConfigError, DataError, PipelineError
from pipeline_lib.core.files import list_files, write_json
from pipeline_lib.core.run_folder import CHECKPOINTS, PLAN_NAME
from pipeline_lib.core.stage import Say
from pipeline_lib.core.store import Spec, Store
from pipeline_lib.core.text import cut, how_to_install
from pipeline_lib.core.units import gigabytes
from pipeline_lib.model.families import PLANNED, SUPPORTED
from pipeline_lib.model.geometry import Geometry
from pipeline_lib.plan.amounts import expected_workload
from pipeline_lib.plan.answer import Answer, Question, answer, in_lines, is_hopeless, lacking, run_of
from pipeline_lib.plan.choose import Wanted, leanest, no_way, what_would_fit
from pipeline_lib.plan.cluster import machine_of, measured_of
from pipeline_lib.plan.context import not_shared, sharing_counts
from pipeline_lib.plan.evaluation import evaluation_warnings
from pipeline_lib.plan.known import (
    blocks_of,
    find_geometry,
    geometry_of,
    is_sealed,
    learn_architecture,
    remembered_specs,
    repetition_of,
    vocabulary_of,
)
from pipeline_lib.plan.machine import Machine, Ranks
from pipeline_lib.plan.predict import lacks_host_memory
from pipeline_lib.plan.search import Setting
from pipeline_lib.plan.show import explain, render, render_what_if
from pipeline_lib.plan.stages import Run, later_problems, local_data_bytes, stored_bytes
from pipeline_lib.plan.steps import Steps, estimated_steps, expected_misfit, plan_batches, step_warnings

# Refusals before any job is submitted: in `snakemake -n`, and in `python -m pipeline_lib check`.
#
# They cost milliseconds, load nothing heavy, and pass over what is not known yet; the plan stage checks again.


_PLANNED_ONLY = f"models of type {' and '.join(PLANNED)} are planned here, and only {', '.join(SUPPORTED)} are trained"
_LOOKED_AT_FILES = 100  # of a source, so that `check` stays fast on slow disks


def refuse_impossible(config: Config, store: Store) -> None:
    """Raise ConfigError with all reasons why `config` cannot be trained, also those in the first rows of local files.

    If the store remembers a sealed training, only the model files that later stages read are checked, and none once the
    merged model is sealed.
    """
    _refuse(config, store, lambda known: [*known.wrong, *_of_data(config, store), *_of_training(config, known, store)])


def refuse_wrong(config: Config, store: Store) -> None:
    """Raise ConfigError with what is wrong in any case, so that neither data nor a plan can be made."""
    _refuse(config, store, lambda known: known.wrong)


def refuse_too_large(config: Config, store: Store) -> None:
    """Raise ConfigError with what the training alone lacks: memory, disk, libraries; data and plan may be made."""
    _refuse(config, store, lambda known: list(_of_training(config, known, store)))


@dataclass(frozen=True)
class _Known:
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
    """Return the problems of a local model's files; if it `is_trained`, only of those that are still to be read."""
    if not isinstance(config.model, LocalModel):
        return []
    folder = Path(config.model.path)
    if not folder.is_dir() or missing_model_files(file.name for file in model_files(folder)):
        return []  # named where the files are hashed
    # Imported here because it loads the tokenizer's library, and numpy.
    from pipeline_lib.model.files import generation_problems, problems_of

    found = generation_problems(folder) if is_trained else problems_of(folder)
    return [f"{model_key(config.model)}: {problem}" for problem in found]


def _known(config: Config, store: Store) -> _Known:
    machine, geometry, wrong = None, None, []
    try:
        train = config.train
        machine = machine_of(config.cluster, train.precision, measured_of(config), train.attention)
    except ConfigError as error:
        wrong += [text if "." in text.partition(":")[0] else f"{error.source}: {text}" for text in error.problems]
    try:
        geometry = find_geometry(config, store)
    except (DataError, OSError) as error:
        wrong.append(f"{model_key(config.model)}: {error}")
    of_model = [problem for problem in _of_model(config, is_trained=False) if problem not in wrong]
    wrong += of_model
    if geometry is not None and not geometry.is_trained:
        if not of_model:  # else they say it
            wrong.append(f"{model_key(config.model)}: {_PLANNED_ONLY}")
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
    """Yield why the data cannot be tokenized, by the first rows of local files, unless they are tokenized already."""
    if is_sealed(config, store, "tokenize"):
        return
    # Imported here because it reads columnar files with Arrow, which takes a moment.
    from pipeline_lib.data.first_rows import first_row

    formats: set[str | None] = set()
    for number, source in enumerate(config.data.train):
        if not isinstance(source, FileData):
            formats.add(source.format if isinstance(source, HubData) else "messages")
            continue
        try:
            files = [file for file in data_files(source.path, source.split) if is_data_file(file.name)]
            for file in files[: 1 if source.max_rows else _LOOKED_AT_FILES]:
                may_be_bad = config.tokenize.max_quarantined_fraction > 0
                row = first_row(file, source, may_be_bad=may_be_bad)
                formats.add(row.format)
                if row.problem:
                    yield f"data.train[{number}].path: {row.problem}"
        except (DataError, OSError):  # named where the files are hashed
            continue
    if formats - {"text", "auto", None}:
        yield from _no_template(config)


def _no_template(config: Config) -> Iterator[str]:
    """Yield a problem if the model's files are on this machine and have no chat template, which conversations need."""
    from pipeline_lib.data.chat_template import has_template, no_template

    model = config.model
    path = model.path if isinstance(model, LocalModel) else model.tokenizer if isinstance(model, TinyModel) else None
    with suppress(DataError):  # a file that cannot be read is named where the model is looked at
        if path is not None and Path(path).is_dir() and not has_template(Path(path)):
            yield f"{model_key(model)}: {no_template(Path(path))}"


def _of_training(config: Config, known: _Known, store: Store) -> Iterator[str]:
    geometry, machine = known.geometry, known.machine
    is_recurrent = geometry is not None and geometry.delta is not None and machine is not None and machine.is_gpu
    yield from _not_installed(config.train, is_recurrent)
    if cross_check(config):  # keys contradict each other, so what follows from them is undefined
        return
    if geometry is None:
        return
    workload = expected_workload(config, geometry.vocab)
    run = Run(config.cluster, config.train, config.evaluate, geometry, workload, machine)
    yield from too_little_disk(run, config, store)
    batch_blocks = config.train.batch_blocks(workload.block_tokens, workload.samples_per_block)
    held, ranks, sizes = (
        held_keys(config.train),
        Ranks.of_cluster(config.cluster),
        (workload.block_tokens, batch_blocks),
    )
    if not sharing_counts(geometry, config.train, held, ranks, *sizes):
        yield not_shared(config.train, ranks.total, *sizes)
        return
    if machine is None:
        return
    setting = Setting(geometry, machine, workload, batch_blocks, None)
    wanted = Wanted(setting, config.train, held, find_spec("deepspeed") is not None)
    if problem := no_way(wanted):
        yield problem
        return
    if wanted.fits:
        yield from later_problems(run)
        return
    train, memory = leanest(wanted)[0]
    if not lacks_host_memory(memory, machine):  # else the training needs more than they do
        yield from later_problems(run)
    if config.train.strategy == AUTO:
        least = lacking(train, memory, machine).removeprefix("train.strategy: ")
        yield in_lines([f"train.strategy: auto finds no way that fits: even {least}", *what_would_fit(wanted)])
    elif is_hopeless(memory, machine):
        yield in_lines([lacking(train, memory, machine), *what_would_fit(wanted)])


_MODULES = {"fla-core": "fla"}  # of libraries that are imported by another name


def _not_installed(train: Train, is_recurrent: bool) -> Iterator[str]:
    """Yield libraries that the training would import and that are not installed; some settings need extras.

    `is_recurrent` means layers with a gated delta rule on GPUs.
    """
    needed = (
        (train.uses_deepspeed, f"train.strategy: {train.strategy}", "DeepSpeed", "deepspeed"),
        (train.precision == "fp8", "train.precision: fp8", "torchao", "fp8"),
        (train.lora.base == "nf4", "train.lora.base: nf4", "bitsandbytes", "nf4"),
        (train.optimizer == "adamw_8bit", "train.optimizer: adamw_8bit", "torchao", "optim8bit"),
        (is_recurrent, "model: its gated delta rule on GPUs", "fla-core", "delta"),
    )
    for is_needed, setting, library, extra in needed:
        if is_needed and find_spec(_MODULES.get(library, library.lower())) is None:
            yield f"{setting} needs {library}, which is not installed here: {how_to_install(extra)}"


def too_little_disk(run: Run, config: Config, store: Store) -> Iterator[str]:
    """Yield a problem if the store's disk has no room for the checkpoints, or for all that the run writes to it.

    Checkpoints and a base model that exist already are not counted again.
    """
    specs = remembered_specs(config, store)
    training = specs["train"] if specs else None
    is_downloaded = isinstance(config.model, LocalModel) or bool(specs and store.is_sealed(specs["model"].ref))
    if problem := no_room(stored_bytes(run, is_downloaded), training, store):
        yield problem


def no_room(sizes: Mapping[str, int], training: Spec | None, store: Store) -> str | None:
    """Return why the store's disk has no room for `sizes`, which the run of `training` writes, or None if it has.

    `sizes` has bytes by name, those of the checkpoints too. Checkpoints that the run has written already are not
    counted again, because later ones replace them.
    """
    folder = store.run_dir(run_digest(training)) / CHECKPOINTS if training else None
    there = sum((folder / name).stat().st_size for name in list_files(folder)) if folder and folder.exists() else 0
    where = next(path for path in (store.root.absolute(), *store.root.absolute().parents) if path.exists())
    free = disk_usage(where).free
    beside = f" beside {gigabytes(there)} of them that lie there" if there else ""
    checkpoints, remedy = sizes["checkpoints"], "free some space, or point PIPELINE_STORE at a larger disk"
    if checkpoints > free + there:
        return (
            f"train.keep_last: the checkpoints kept and the one being written need {gigabytes(checkpoints)}, and "
            f"{gigabytes(free)} are free in {where}{beside}; {remedy}"
        )
    total = sum(sizes.values())
    if total <= free + there:
        return None
    parts = ", ".join(f"{name} {gigabytes(size)}" for name, size in sizes.items() if size)
    return f"the run writes {gigabytes(total)} ({parts}), and {gigabytes(free)} are free in {where}{beside}; {remedy}"


# `python -m pipeline_lib plan CONFIG`: the plan from what is known now, without GPU or data. A network is needed only
# for a hub model that is in no table, and only once: for its config.json.

DOCUMENTS = "workload.document_tokens"


def show_plan(path: Path, what_if: Sequence[str], is_detailed: bool, store: Store, say: Say) -> None:
    """Show the plan of the config at `path`, and write it to RESULTS/NAME/plan.json unless a report is there.

    With `is_detailed` all figures and formulas follow. For a sweep, this is the plan of the first experiment. With
    `what_if`, texts KEY=VALUE, show it beside the plan with those keys changed; beside those of the config, DOCUMENTS
    is the mean length of a document, weighted by tokens. A what-if plan is not written, nor is one that cannot be run.
    Raise ConfigError after the plan if the run is impossible, and DataError if the model's sizes are not known here.
    """
    configs = load_configs(path)
    config = configs[0]
    learn_architecture(config, store, say)
    found = _answer(path, config, store)
    if what_if:
        told = [text for text in what_if if text.partition("=")[0] == DOCUMENTS]
        now, config = found, load_config(path, [text for text in what_if if text not in told])
        learn_architecture(config, store, say)
        found = _answer(path, config, store, _document_tokens(told[-1], config) if told else None)
        say(render_what_if(now.content, found.content, what_if, is_detailed))
    else:
        say(render(found.content, is_detailed))
    if not is_detailed:
        say("\nall figures and formulas: --details")
    if len(configs) > 1:
        say(f"\nthis is the first of {len(configs)} experiments; `snakemake plan` makes the plans of all")
    shown = configs if not what_if else [config]
    misfits = collapsed([(one.experiment, _expected_misfit(one, store)) for one in shown])
    for text in (*warnings_of(shown), *misfits, *long_evaluations(shown, store)):
        say(f"\nwarning: {text}")
    if not is_sealed(config, store, "train"):
        question = question_of(config, store)
        run, untrained = run_of(question), () if question.geometry.is_trained else (_PLANNED_ONLY,)
        for problem in (*untrained, *too_little_disk(run, config, store), *later_problems(run)):
            say(f"\nthe training would be refused: {problem}")
    if not what_if and found.refusal is None:
        kept = RESULTS / config.experiment / PLAN_NAME
        # With a report, the folder's plan is the one that the finished run was made from.
        if (kept.parent / "report.html").exists():
            say(f"\nnot written to {kept}: this run has finished, and its plan is kept")
        else:
            write_json(kept, found.content)
            say(f"\nwrote {kept}")
    if is_detailed and found.wanted is not None and found.choice is not None:
        say(f"\n{explain(found.choice.chosen, found.wanted.setting)}")
    if found.refusal is not None:
        raise ConfigError(str(path), [found.refusal])


def _document_tokens(what_if: str, config: Config) -> float:
    """Return the value of DOCUMENTS=VALUE. Raise ConfigError if it is not a length that blocks have room for."""
    text, most = what_if.partition("=")[2], config.shard.block_tokens
    try:
        tokens = float(text)
    except ValueError:
        tokens = math.nan
    if not 1 <= tokens <= most:
        problem = f"{cut(text, 20)!r} is not a number from 1 to {most:,}, which is shard.block_tokens"
        raise ConfigError(f"{FLAG} {what_if}", [problem])
    return tokens


def _answer(path: Path, config: Config, store: Store, document_tokens: float | None = None) -> Answer:
    try:
        question = question_of(config, store)
        if document_tokens is not None:
            question = replace(question, workload=question.workload.with_documents(document_tokens))
        if question.blocks is None:
            estimated = estimated_steps(config, question.batch(config.train), question.geometry.vocab)
            question = replace(question, estimated=estimated)
        if problems := list(question.geometry.problems(config.train, config.shard.block_tokens)):
            raise ConfigError(str(path), problems)
        return answer(question)
    except ConfigError as error:
        raise ConfigError(str(path), error.problems) from error


def question_of(config: Config, store: Store) -> Question:
    """Return the input of the plan. Raise DataError for an unknown model, ConfigError for a wrong cluster.json."""
    geometry, blocks = geometry_of(config, store), blocks_of(config, store)
    return Question(
        experiment=config.experiment,
        geometry=geometry,
        train=config.train,
        cluster=config.cluster,
        tracking=config.tracking,
        workload=blocks.workload if blocks else expected_workload(config, geometry.vocab),
        blocks=blocks,
        held=held_keys(config.train),
        measured=measured_of(config),
        has_deepspeed=find_spec("deepspeed") is not None,
        repetition=repetition_of(config, store),
        evaluate=config.evaluate,
        data_bytes=_data_bytes(config),
        has_near_duplicates=config.tokenize.near_duplicates is not None,
    )


def _data_bytes(config: Config) -> int | None:
    """Return the size of the data, None if it is not all in local files that exist."""
    if not all(isinstance(one, FileData) for one in config.data.train):
        return None
    with suppress(PipelineError, OSError):  # missing files are named where they are hashed
        return local_data_bytes(config)
    return None


def lengths_of_runs(configs: Sequence[Config], store: Store, source: str) -> tuple[list[str], list[str]]:
    """Return the optimizer steps of each run as far as they are known, and warnings about them; equal ones are merged.

    They are exact once the data is packed into blocks, or where `max_steps` is given. Raises ConfigError, which begins
    with `source`, for batches and steps that the plan of the packed data will refuse.
    """
    lengths, warnings, problems = [], [], []
    for config in configs:
        try:
            found, own = _length_of_run(config, store)
        except DataError as error:
            problems.append((config.experiment, [str(error)]))
            continue
        except (PipelineError, OSError):  # the plan says by itself what is wrong
            continue
        lengths.append((config.experiment, found))
        warnings.append((config.experiment, own))
    if problems:
        raise ConfigError(source, collapsed(problems))
    return collapsed(lengths), collapsed(warnings)


def _length_of_run(config: Config, store: Store) -> tuple[list[str], list[str]]:
    train, ranks, blocks = config.train, config.cluster.ranks, blocks_of(config, store)
    vocabulary = vocabulary_of(config, store)
    workload = blocks.workload if blocks else expected_workload(config, vocabulary)
    batch = plan_batches(train, ranks, blocks.training if blocks else None, workload)
    steps = (None if blocks else estimated_steps(config, batch, vocabulary)) or Steps.of(batch)
    if steps is None:
        return [], []
    return [steps.in_words()], [*step_warnings(train, batch, steps, ranks), *_expected_misfit(config, store)]


def _expected_misfit(config: Config, store: Store) -> list[str]:
    """Return the warning that the packed data would be refused for its `global_batch_samples`, if that is likely."""
    if config.train.global_batch_samples is None or blocks_of(config, store):
        return []
    problem = expected_misfit(config, vocabulary_of(config, store))
    return [problem] if problem else []


def long_evaluations(configs: Sequence[Config], store: Store) -> list[str]:
    """Return warnings about evaluations on CPUs and bounded answers; equal ones of a sweep are merged."""
    return collapsed([(config.experiment, _long_evaluation(config, store)) for config in configs])


def _long_evaluation(config: Config, store: Store) -> list[str]:
    try:
        question = question_of(config, store)
        machine = question.machine
    except PipelineError:
        return []
    return list(evaluation_warnings(config, question.geometry, question.workload, machine)) if machine else []


def little_memory(configs: Sequence[Config], store: Store) -> list[str]:
    """Return warnings about trainings that do not fit and are not refused: on CPUs a machine may have more memory."""
    return collapsed([(config.experiment, list(_little_memory(config, store))) for config in configs])


def _little_memory(config: Config, store: Store) -> Iterator[str]:
    try:
        question = question_of(config, store)
        machine, batch = question.machine, question.batch(question.train)
    except PipelineError:
        return
    if machine is None or machine.is_gpu or is_sealed(config, store, "train"):
        return
    setting = Setting(question.geometry, machine, question.workload, batch.global_batch_blocks, batch.steps)
    ways = leanest(Wanted(setting, question.train, question.held, question.has_deepspeed))
    if ways and lacks_host_memory(ways[0][1], machine):
        yield lacking(*ways[0], machine)
