"""What cannot be, said before any job is submitted: in `snakemake -n`, and in `python -m pipeline_lib check`.

Costs milliseconds, loads nothing heavy, and is silent about what is not known yet; the plan stage looks again.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from shutil import disk_usage

from pipeline_lib.base.errors import ConfigError, DataError
from pipeline_lib.base.fsio import list_files
from pipeline_lib.base.store import Store
from pipeline_lib.config.compile import held_keys, run_digest
from pipeline_lib.config.schema import Config
from pipeline_lib.plan.checkpoints import checkpoint_bytes
from pipeline_lib.plan.choice import Setting
from pipeline_lib.plan.cluster import machine_of
from pipeline_lib.plan.document import in_lines, is_hopeless, lacking
from pipeline_lib.plan.feasible import Wanted, leanest, what_would_fit
from pipeline_lib.plan.geometry import Geometry
from pipeline_lib.plan.known import find_geometry, is_sealed, measured_content, remembered_specs
from pipeline_lib.plan.machine import Machine
from pipeline_lib.plan.measured import read_measured
from pipeline_lib.plan.units import gigabytes
from pipeline_lib.plan.workload import Workload


def refuse_impossible(config: Config, store: Store) -> None:
    """Raise ConfigError with all reasons why the training of `config` cannot be. None for one that was done already."""
    if is_sealed(config, store, "train"):
        return
    if problems := list(_problems(config, store)):
        raise ConfigError(f"experiment {config.experiment!r}", problems)


def refuse_several_nodes(nodes: int) -> None:
    """Raise ConfigError for a training on more than one node, which can be planned only."""
    if nodes > 1:
        text = f"cluster.nodes: training on {nodes} nodes is not supported yet, only planning it (`snakemake plan`)"
        raise ConfigError("the training", [f"{text}; set it to 1"])


def _problems(config: Config, store: Store) -> Iterator[str]:
    machine: Machine | None = None
    try:
        content = measured_content(config)
        measured = read_measured(content) if content is not None else None
        machine = machine_of(config.cluster, config.train.precision, measured)
    except ConfigError as error:
        yield from (text if "." in text.partition(":")[0] else f"{error.source}: {text}" for text in error.problems)
    try:
        geometry = find_geometry(config, store)
        if geometry is not None:
            yield from _of_model(config, geometry, machine, store)
    except DataError as error:
        yield str(error)


def _of_model(config: Config, geometry: Geometry, machine: Machine | None, store: Store) -> Iterator[str]:
    yield from too_long(config, geometry)
    needed = checkpoint_bytes(geometry, config.train) * (config.train.keep_last + config.train.keep_best + 1)
    yield from _too_little_disk(needed, config, store)
    if machine is None:
        return
    batch_blocks = config.train.global_batch_tokens // config.shard.block_tokens
    setting = Setting(geometry, machine, Workload.assumed(config), batch_blocks, None)
    wanted = Wanted(setting, config.train, held_keys(config.train), find_spec("deepspeed") is not None)
    ways = leanest(wanted)
    if not ways or wanted.fits:
        return
    train, memory = ways[0]
    if config.train.strategy == "auto":
        least = lacking(train, memory, machine).removeprefix("train.strategy: ")
        yield in_lines([f"train.strategy: auto finds no way that fits: at the least, {least}", *what_would_fit(wanted)])
    elif is_hopeless(memory, machine):
        yield in_lines([lacking(train, memory, machine), *what_would_fit(wanted)])


def too_long(config: Config, geometry: Geometry) -> Iterator[str]:
    """The problem of blocks that are longer than the model reaches, if they are."""
    if config.shard.block_tokens > geometry.max_positions:
        text = f"{config.shard.block_tokens} tokens are more than the model's {geometry.max_positions} positions"
        yield f"shard.block_tokens: {text}; lower it"


def _too_little_disk(needed_bytes: int, config: Config, store: Store) -> Iterator[str]:
    """Checkpoints that lie there already are not counted again."""
    specs = remembered_specs(config, store)
    run = store.run_dir(run_digest(specs["train"])) if specs else None
    there = sum((run / name).stat().st_size for name in list_files(run)) if run and run.exists() else 0
    where = next(path for path in (store.root.absolute(), *store.root.absolute().parents) if path.exists())
    free = disk_usage(where).free
    if needed_bytes > free + there:
        yield (
            f"train.keep_last: the checkpoints kept and the one being written need {gigabytes(needed_bytes)}, and "
            f"{gigabytes(free + there)} are free in {where}; free some space, or point PIPELINE_STORE at a larger disk"
        )
