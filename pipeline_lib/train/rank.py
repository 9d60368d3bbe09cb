"""One rank of a training run: builds the model, trains, and leaves the final step for the store."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.logging import set_verbosity_error

from pipeline_lib.arch.families import read_geometry
from pipeline_lib.arch.peft_adapter import refuse_other_adapters
from pipeline_lib.arch.weight_files import weights_bytes
from pipeline_lib.config.compile import run_digest
from pipeline_lib.config.content import ADAPTER_FOLDER, ADAPTER_WEIGHTS
from pipeline_lib.config.rope import rope_in
from pipeline_lib.config.spec_settings import ADAPTER_PART
from pipeline_lib.config.train import CHOSEN_KEYS, PLACEMENT_KEYS, Train, read_train
from pipeline_lib.core.errors import TrainingError
from pipeline_lib.core.events import EventLog, EventName, Observer
from pipeline_lib.core.files import write_json, write_jsonl
from pipeline_lib.core.lock import Lock
from pipeline_lib.core.processes import die_with_parent
from pipeline_lib.core.run_folder import (
    CHECKPOINTS,
    EVENTS_NAME,
    METRICS_NAME,
    SUMMARY_NAME,
    WEIGHTS,
    step_name,
)
from pipeline_lib.core.stage import Say, processor
from pipeline_lib.core.store import Spec, Store
from pipeline_lib.core.units import count, size
from pipeline_lib.data.blocks import BlockReader
from pipeline_lib.launch.ranks import StopRequest
from pipeline_lib.model.build import build_trainable, decoder_layers
from pipeline_lib.model.gpu import make_deterministic, why_not_compiled
from pipeline_lib.model.probe import probe_block, probe_logits, save_probe
from pipeline_lib.model.weights import load_weights
from pipeline_lib.records.plan import PlanDocument
from pipeline_lib.records.record import to_json
from pipeline_lib.records.training import Training, speed, training_time_s
from pipeline_lib.train import checkpoint, saved_tensors, state
from pipeline_lib.train.deepspeed import Zero
from pipeline_lib.train.dist import LEAVING, Timeouts, World, process_group, sum_over_ranks
from pipeline_lib.train.loop import Batches, Loop, listed
from pipeline_lib.train.measure import Meter, instruments
from pipeline_lib.train.mesh import batch_share_of
from pipeline_lib.train.metrics import (
    ROWS_FOLDER,
    MetricsRows,
    Row,
    append_metrics,
    print_progress,
)
from pipeline_lib.train.optimizer import trainable
from pipeline_lib.train.out_of_memory import MemoryWatch
from pipeline_lib.train.saver import Saver
from pipeline_lib.train.saving_pace import warn_of_slow_saves
from pipeline_lib.train.staging import HostBuffers
from pipeline_lib.train.step import Stepper
from pipeline_lib.train.strategies import make_strategy
from pipeline_lib.train.strategy import Strategy
from pipeline_lib.train.together import together
from pipeline_lib.train.validation import Sampler, leave_samples

DEEPSPEED_NAME = "deepspeed.json"


@dataclass(frozen=True)
class RankJob:
    """The launcher's order to a rank: spec, plan, output directory, and any verified checkpoint.

    `lock` is the launcher's lock on the run.
    """

    spec: Spec
    store: Store
    plan: PlanDocument
    out: Path
    attempt: int
    lock: Lock
    resume_from: Path | None

    @property
    def train(self) -> Train:
        """The settings of the run: computation from the spec, placement from the plan."""
        chosen = vars(self.plan.chosen)
        placement = {key: chosen[key] for key in PLACEMENT_KEYS}
        return read_train({**self.spec.settings, **placement})

    @property
    def run_dir(self) -> Path:
        """The folder of this run's checkpoints, events and live metrics."""
        return self.store.run_dir(run_digest(self.spec))

    def input(self, name: str) -> Path:
        """Return the sealed directory of the input `name`, which the launcher has verified."""
        return self.store.sealed(self.spec.inputs[name])

    def loading(self, train: Train, device: torch.device) -> Callable[[nn.Module], None]:
        """Return what fills a model on `device` with the weights that the training begins at.

        Adapters are new ones, or the ones that are trained on. Raises DataError if `train` describes
        others.
        """
        adapter = None
        if ADAPTER_PART in self.spec.inputs:
            folder = self.input(ADAPTER_PART) / ADAPTER_FOLDER
            refuse_other_adapters(folder, train.lora)
            adapter = folder / ADAPTER_WEIGHTS
        return partial(
            load_weights,
            folder=self.input("model"),
            device=device,
            adapter_seed=train.seed,
            adapter=adapter,
        )


def let_first_rank_warn(world: World) -> None:
    """Silence transformers' warnings on all ranks but the first: they are the same there."""
    if not world.is_first:
        set_verbosity_error()  # type: ignore[no-untyped-call]


def train_rank(
    job: RankJob, environ: Mapping[str, str], say: Say, observers: tuple[Observer, ...] = ()
) -> None:
    """Run the training as the rank in `environ`. Raises PipelineError.

    `observers` receive all events of this rank.
    """
    die_with_parent()
    cluster = job.plan.cluster
    torch.set_num_threads(cluster.cpus_per_rank)
    world = World.from_env(environ, cluster.device)
    let_first_rank_warn(world)
    train = _compiled_where_possible(job.train, world, say)
    if train.deterministic:
        make_deterministic()
    if job.resume_from is not None:
        checkpoint.refuse_foreign(job.resume_from, job.spec)
    folder = job.input("model")
    reader, held_out = (BlockReader(job.input("shard") / part) for part in ("train", "validation"))
    batch_blocks = train.batch_blocks(reader.block_tokens, reader.samples_per_block())
    geometry = read_geometry(folder)
    watch = MemoryWatch(world, geometry, train, reader.block_tokens, batch_blocks)
    timeouts = Timeouts(train.start_timeout_s, train.timeout_s)
    with process_group(world, train.start_timeout_s), watch.explained(), StopRequest() as stop:
        share = batch_share_of(world, train)
        batches = Batches(reader, train.seed, batch_blocks, train.micro_batch_blocks, share)
        total_steps = batches.total_steps(train)
        last_step = min(train.until_step or total_steps, total_steps)
        if world.is_first:
            watch.announce(say)
            observers += _observers_of_first(job, train, batches, last_step, say)
        log_path = job.run_dir / EVENTS_NAME if world.is_first else None
        observers = (watch, timeouts.observe, *observers)
        events = EventLog(log_path, observers, rank=world.rank, attempt=job.attempt)
        strategy = make_strategy(world, train, train.accumulation(batch_blocks, world.size))
        model = build_trainable(folder, train, rope_in(job.spec.settings))
        sizes = _sizes_of(model)
        if world.is_first:
            say(f"train: loading {size(weights_bytes(folder))} of weights")
        wrapped = strategy.spread(model, job.loading(train, world.device))
        if world.is_first and isinstance(strategy, Zero):
            write_json(job.run_dir / DEEPSPEED_NAME, strategy.config)
        # of a model's own dropout; that of adapters is drawn by block
        torch.manual_seed(train.seed + world.rank)
        stepper = Stepper(wrapped, strategy, world, stop)
        sampler = None
        if train.sample_every_steps:
            sampler = Sampler.of(held_out, folder, share, world, job.run_dir)
        placed = _placement(train, world, environ)
        events.emit(EventName.RUN_START, **placed, last_step=last_step, **sizes)
        # over gloo: NCCL's first exchange has no timeout
        sum_over_ranks([0.0], torch.device("cpu"))
        wrapped.train()
        meter = Meter.of(world, geometry, train)
        with (
            _saver(job, strategy, world, train, events) as saver,
            instruments(batches.of_step, last_step, meter, events) as measuring,
        ):
            loop = Loop(
                train=train,
                rows=MetricsRows(job.run_dir / ROWS_FOLDER),
                stepper=stepper,
                instruments=measuring,
                batches=batches,
                held_out=held_out,
                saver=saver,
                sampler=sampler,
                events=events,
                total_steps=total_steps,
                last_step=last_step,
                attempt=job.attempt,
                processor=placed["processor"],
            )
            if world.is_first:
                say(f"train: {_first_pass(train, wrapped)}")
            loop.run(job.resume_from)
            events.notify(EventName.RANK_DOING, what=LEAVING)
            _leave_result(job, loop, sizes)
        events.emit(EventName.RUN_END, step=loop.step)


def _observers_of_first(
    job: RankJob, train: Train, batches: Batches, last_step: int, say: Say
) -> tuple[Observer, ...]:
    """Return what only the first rank does with events: it shows and keeps them."""
    return (
        print_progress(say, last_step),
        warn_of_slow_saves(say, train, batches.epoch_steps),
        append_metrics(job.run_dir / METRICS_NAME),
    )


def _sizes_of(model: nn.Module) -> dict[str, int]:
    """Return the numbers of all parameters, and of the trained ones."""
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "trainable_parameters": sum(it.numel() for it in trainable(model).values()),
    }


def _placement(train: Train, world: World, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return where and how the run computes: what may change when it continues."""
    placed = {key: getattr(train, key) for key in ("strategy", *CHOSEN_KEYS)}
    return {**placed, "processor": _processor_of(world, environ), "world_size": world.size}


def _compiled_where_possible(train: Train, world: World, say: Say) -> Train:
    """Return `train`, without compilation where this rank's GPU cannot have it."""
    reason = why_not_compiled(world.device) if world.device.type == "cuda" else ""
    if not reason:
        return train
    if world.is_first:
        say(
            "the loss takes up to 2.1 GB more, and layers are not compiled, which costs speed and "
            f"memory: {reason}"
        )
    return train.model_copy(update={"compile": False})


def _first_pass(train: Train, wrapped: Any) -> str:
    """Return what is done before the first step, which is a pass that is discarded."""
    if train.compile is not True:
        return "a first pass, which is discarded"
    # layers of a kind share it
    kinds = {getattr(layer.forward, "__func__", None) for layer in decoder_layers(wrapped)}
    return (
        f"compiling {count(len(kinds), 'kinds of layers')} in a first pass; what an earlier run "
        "compiled is kept"
    )


def _processor_of(world: World, environ: Mapping[str, str]) -> str:
    """Return the kind of GPU or CPU that this rank computes on."""
    if world.device.type == "cuda":
        return torch.cuda.get_device_name(world.device)
    return processor(environ)


def _saver(job: RankJob, strategy: Strategy, world: World, train: Train, events: EventLog) -> Saver:
    return Saver(
        job.run_dir / CHECKPOINTS,
        world=world,
        train=train,
        spec=job.spec,
        events=events,
        lock=job.lock,
        state_elements=sum(strategy.state_sizes().values()),
        buffers=HostBuffers(world) if world.device.type == "cuda" else None,
    )


def _leave_result(job: RankJob, loop: Loop, sizes: dict[str, int]) -> None:
    """Leave the trained weights, the probe and the records in the directory that is sealed.

    The weights are those of the checkpoint of the same step, which is not written again.
    """
    wrapped = loop.stepper.wrapped
    strategy = loop.stepper.strategy
    world = loop.stepper.world
    result_step = loop.take_best()
    source = job.run_dir / CHECKPOINTS / step_name(result_step)
    folder = job.out / WEIGHTS
    is_linked = together(
        None, folder, lambda: world.is_first and saved_tensors.link_weights(source, folder)
    )[0]
    damaged: list[str] = []

    def checked_parts() -> Iterator[Mapping[str, Tensor]]:
        for part in loop.saver.parts(strategy, (WEIGHTS,)):
            damaged.extend(state.not_finite(part))
            yield part

    if is_linked:
        for _part in checked_parts():
            continue
    else:
        saved_tensors.save_parts(job.out, checked_parts(), world)
    if names := loop.agree_on(damaged):
        raise TrainingError(
            f"{listed(names)} hold NaN or infinity after step {result_step}, so there is no "
            f"result: try a lower train.lr; checkpoints in {job.run_dir / CHECKPOINTS} that hold "
            "such values are refused, too"
        )
    probed = loop.held_out if len(loop.held_out) else loop.batches.reader
    block = probe_block(probed[0], loop.train.ranks_per_block)
    with strategy.autocast():
        logits = probe_logits(wrapped, block, world.device, loop.batches.share.part)
    if not world.is_first:
        return
    save_probe(job.out, block, logits)
    rows = loop.rows.all()
    write_jsonl(job.out / METRICS_NAME, rows)
    leave_samples(job.run_dir, job.out, loop.step)
    summary = _summary(loop, rows, result_step, sizes)
    write_json(job.out / SUMMARY_NAME, to_json(summary))


def _summary(loop: Loop, rows: list[Row], result_step: int, sizes: Mapping[str, int]) -> Training:
    """Return the summary of the run, whose weights of step `result_step` are left."""
    validations = loop.validations
    accepted = [row["loss"] for row in rows if "verdict" not in row]
    return Training(
        steps=loop.step,
        updates=loop.updates,
        total_steps=loop.total_steps,
        result_step=result_step,
        best_step=validations.best_step or None,
        best_validation_loss=validations.best_loss if validations.best_step else None,
        stopped_early=loop.has_stopped_early,
        skipped_steps=sum("verdict" in row for row in rows),
        epochs=loop.batches.epochs(loop.train),
        world_size=loop.stepper.world.size,
        strategy=loop.train.strategy,
        method=loop.train.method,
        precision=loop.train.precision,
        tokens=sum(row["tokens"] for row in rows),
        supervised_tokens=sum(row["supervised_tokens"] for row in rows),
        train_s=round(sum(row["step_s"] for row in rows), 3),  # in steps alone
        training_time_s=training_time_s((row["attempt"], row["elapsed_s"]) for row in rows),
        tokens_per_s=speed(row["tokens_per_s"] for row in rows),
        attempts=len({row["attempt"] for row in rows}),
        final_loss=accepted[-1] if accepted else None,
        blocks=len(loop.batches.reader),
        batch_blocks=loop.batches.batch_blocks,
        parameters=sizes["parameters"],
        trainable_parameters=sizes["trainable_parameters"],
    )
