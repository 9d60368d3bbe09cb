"""Batches and optimizer steps: exact once there are blocks, before that estimated from first rows.

No numpy is loaded before there are blocks, since a plan can be made without any.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pipeline_lib.config.checks import has_few_blocks, more_than_one, warmup_problem
from pipeline_lib.config.schema import Config
from pipeline_lib.config.train import AUTO, Train
from pipeline_lib.core import units
from pipeline_lib.core.errors import DataError
from pipeline_lib.plan.amounts import amounts_of, expected_workload
from pipeline_lib.records.data import BlockGroup, BlockIndex
from pipeline_lib.records.plan import PlannedBatch, Workload

# by which the samples of a step, and the ranks' shares of it, may differ from what is asked for
MOST_OFF = 0.1
FEW_STEPS = 50
_LEAST_BLOCK = 128  # tokens: fewer are offered for no batch, since hardly a conversation would fit
_BLOCK_UNIT = 16  # tokens that offered lengths of a block are multiples of
_SHORTER = "shard.block_tokens (and tokenize.max_tokens)"  # blocks have room for the longest sample


def batch_without_data(train: Train, ranks: int, workload: Workload) -> PlannedBatch:
    """Return the batch plan as far as it is known before there are blocks."""
    batch_blocks = train.batch_blocks(workload.block_tokens, workload.samples_per_block)
    return PlannedBatch(
        block_tokens=workload.block_tokens,
        global_batch_blocks=batch_blocks,
        micro_batch_blocks=train.micro_batch_blocks,
        accumulation=train.accumulation(batch_blocks, ranks),
        epochs=train.epochs,
        tokens_per_step=batch_blocks * workload.block_tokens,
        steps=min(train.until_step or train.max_steps, train.max_steps)
        if train.max_steps
        else None,
    )


def plan_batches(
    train: Train, ranks: int, training: BlockIndex | None, workload: Workload
) -> PlannedBatch:
    """Return the batch plan over `ranks` ranks for the blocks of `training`, by `workload`.

    Without blocks, it is that of `batch_without_data`. Raise DataError if the training blocks do
    not make a step, if they cannot meet `global_batch_samples`, or if all steps are warm-up.
    """
    batch = batch_without_data(train, ranks, workload)
    if training is None:
        return batch
    from pipeline_lib.data.order import epoch_steps, run_epochs, run_steps

    batch_blocks = batch.global_batch_blocks
    if problem := _misfit(train, ranks, workload):
        raise DataError(problem)
    all_steps = run_steps(train, training.groups, batch_blocks)
    if not all_steps:
        raise _nothing_to_train_on(training.groups, train.epochs)
    if problem := warmup_problem(train, all_steps):
        raise DataError(f"train.warmup_steps: {problem}")
    return replace(
        batch,
        epochs=run_epochs(train, training.groups, batch_blocks),
        blocks=training.blocks,
        epoch_blocks=training.epoch_blocks,
        validation_blocks=workload.validation_blocks,
        steps_per_epoch=epoch_steps(training.groups, batch_blocks),
        steps=min(train.until_step or all_steps, all_steps),
        last_step_blocks=(training.epoch_blocks - 1) % batch_blocks + 1
        if training.epoch_blocks
        else 0,
        padding_fraction=round(1 - training.packing_efficiency, 6),
        samples_per_step=round(batch_blocks * workload.samples_per_block, 2),
        supervised_tokens_per_step=round(batch.tokens_per_step * workload.supervised_fraction, 1),
    )


def _misfit(train: Train, ranks: int, workload: Workload) -> str | None:
    """Return why whole blocks cannot meet `global_batch_samples`, and what would; None if they do.

    Idle ranks are allowed, but not with local SGD: an update of a rank that has no samples is none.
    """
    wanted = train.global_batch_samples
    each = workload.samples_per_block
    if wanted is None:
        return None
    blocks = train.batch_blocks(workload.block_tokens, each)
    if abs(blocks * each - wanted) > MOST_OFF * wanted:
        fitting = int(workload.block_tokens * wanted / each)
        return (
            f"train.global_batch_samples: {wanted} cannot be met within {MOST_OFF:.0%}: "
            f"{_held(workload)}; set {round(blocks * each)}, or {_SHORTER} to {fitting:,} or less"
        )
    return idle_ranks(train, ranks, workload) if train.local_sgd_steps > 1 else None


def idle_ranks(train: Train, ranks: int, workload: Workload) -> str | None:
    """Return how long ranks idle with `global_batch_samples`, and a remedy; None if hardly."""
    wanted = train.global_batch_samples
    each = workload.samples_per_block
    if wanted is None:
        return None
    blocks = train.batch_blocks(workload.block_tokens, each)
    at_once = train.blocks_at_once(ranks)
    # Which of the numbers of ranks that may share a block is taken is for the plan to say, which
    # knows the model.
    is_open = train.context_ranks == AUTO and has_few_blocks(train, ranks, blocks)
    if is_shared_well(train, at_once, blocks) or (
        is_open and any(more_than_one(train, ranks, workload.block_tokens))
    ):
        return None
    places = train.accumulation(blocks, ranks) * at_once
    shares = units.count(ranks, "ranks")
    if train.ranks_per_block > 1:
        shares += f", {train.ranks_per_block} to a block,"
    if train.micro_batch_blocks > 1:
        shares += f" x {train.micro_batch_blocks} blocks"
    fitting_samples = [
        round(count * at_once * each) for count in {max(1, blocks // at_once), places // at_once}
    ]
    fewer = range(train.ranks_per_block, ranks, train.ranks_per_block)
    fitting_ranks = [count for count in fewer if blocks % train.blocks_at_once(count) == 0]
    remedies = [f"set {' or '.join(map(str, sorted(fitting_samples)))}"]
    if fitting_ranks:
        remedies.append(units.count(fitting_ranks[-1], "ranks"))
    if blocks < at_once:
        remedies.append(f"{_SHORTER} {workload.block_tokens * blocks // at_once:,}")
    return (
        f"train.global_batch_samples: {wanted} are {units.count(blocks, 'blocks')} "
        f"({_held(workload)}), and {shares} "
        f"are idle for {1 - blocks / places:.0%} of the time; {', or '.join(remedies)}"
    )


def _held(workload: Workload) -> str:
    return (
        f"a block of shard.block_tokens {workload.block_tokens:,} holds "
        f"{workload.samples_per_block:.1f} samples on average"
    )


def is_shared_well(train: Train, at_once: int, blocks: int) -> bool:
    """Return whether no rank idles in a step of `blocks` blocks, or with `global_batch_samples`.

    All ranks together process `at_once` of the blocks at a time.
    """
    idle = -blocks % at_once
    return idle <= (0 if train.global_batch_samples is None else MOST_OFF * (blocks + idle))


def _nothing_to_train_on(groups: list[BlockGroup], epochs: float) -> DataError:
    held = ", ".join(f"{group.blocks} of weight {group.weight:g}" for group in groups)
    needed = min(math.ceil(1 / group.per_epoch) for group in groups)
    return DataError(
        f"no step to train: of the training blocks ({held}), train.epochs: {epochs:g} uses none, "
        f"because blocks times weight times epochs is less than 1; set train.epochs to {needed} or "
        "more, or raise the weights in data.train"
    )


# Steps before there are blocks, by the amounts of amounts.py.

_UNFILLED = 0.5  # of a sample's length, which a block has no room for if all are about as long
_KEPT_ROWS = (0.7, 1.0, 1.3)  # rows may be dropped, and the number of rows is extrapolated


@dataclass(frozen=True)
class Steps:
    """Optimizer steps of an epoch and of the run, as (low, value, high): equal if exact."""

    epoch: tuple[int, int, int] | None
    run: tuple[int, int, int]
    is_estimated: bool = False

    def in_words(self) -> str:
        """Return both in words, and what an estimate is based on."""
        words = _banded(self.run)
        if self.epoch is not None and self.epoch != self.run:
            words += f", {'about ' if self.is_estimated else ''}{self.epoch[1]:,} an epoch"
        return (
            f"{words}, estimated from the first rows of the files" if self.is_estimated else words
        )

    @classmethod
    def of(cls, batch: PlannedBatch) -> "Steps | None":
        """Return the exact steps of `batch`; None while they are not known."""
        if batch.steps is None:
            return None
        epoch = batch.steps_per_epoch
        return cls(None if epoch is None else (epoch,) * 3, (batch.steps,) * 3)


def _banded(steps: tuple[int, int, int]) -> str:
    low, value, high = steps
    many = units.count(value, "optimizer steps")
    return many if low == high else f"about {many} ({low:,} to {high:,})"


def estimated_steps(config: Config, batch: PlannedBatch, vocabulary: int | None) -> Steps | None:
    """Return the steps by the first rows of the files; None if `amounts_of` expects nothing.

    `vocabulary` is the size of the model's, None if it is not known.
    """
    amounts = amounts_of(config, vocabulary)
    if amounts is None:
        return None
    bounds = []
    for amount, kept_rows in zip(amounts, _KEPT_ROWS, strict=True):
        if config.train.global_batch_samples is not None:
            bounds.append(amount.samples * kept_rows / config.train.global_batch_samples)
        else:
            bounds.append(amount.tokens * min(1.0, kept_rows) / batch.tokens_per_step)
    if config.train.global_batch_samples is None:
        bounds[2] /= 1 - _UNFILLED * amounts[1].tokens_per_sample / batch.block_tokens
    epoch = (
        max(1, math.floor(min(bounds))),
        max(1, round(bounds[1])),
        max(1, math.ceil(max(bounds))),
    )
    if batch.steps is not None:  # train.max_steps
        return Steps(epoch, (batch.steps,) * 3, is_estimated=True)
    low, value, high = (math.ceil(steps * config.train.epochs) for steps in epoch)
    return Steps(epoch, (low, value, high), is_estimated=True)


_LONGER_THAN_MEAN = 2.5  # times: so long are samples that a limit must not drop
_SAFE_BLOCKS = 5  # of a step: no number of samples is off by more than MOST_OFF then


def expected_misfit(config: Config, vocabulary: int | None) -> str | None:
    """Return that whole blocks would miss `global_batch_samples`, by the first rows; None if not.

    The plan of the packed data will then refuse it. The values named do for other lengths than the
    estimated ones too.
    """
    train = config.train
    ranks = config.cluster.ranks
    block_tokens = config.shard.block_tokens
    wanted = train.global_batch_samples
    workload = expected_workload(config, vocabulary)
    if wanted is None or not workload.is_estimated or _misfit(train, ranks, workload) is None:
        return None
    each = workload.samples_per_block
    at_once = train.blocks_at_once(ranks)
    blocks = max(1, round(wanted / each / at_once)) * at_once
    remedies = [
        f"set train.global_batch_tokens: {blocks * block_tokens:,} instead, about "
        f"{blocks * each:,.0f} samples",
        f"train.global_batch_samples to {math.ceil(_SAFE_BLOCKS * each):,} or more",
    ]
    shorter = int(block_tokens * wanted / each / _SAFE_BLOCKS) // _BLOCK_UNIT * _BLOCK_UNIT
    if shorter >= _LONGER_THAN_MEAN * workload.real_fraction * block_tokens / each:
        remedies.append(f"{_SHORTER} to {shorter:,} or less")
    return (
        f"train.global_batch_samples: {wanted} is likely to be refused once the data is packed: by "
        f"the first rows of the files, a block of {block_tokens:,} tokens would hold about "
        f"{each:,.0f} samples, and a step takes whole blocks; {', or '.join(remedies)}"
    )


# Warnings about runs that are shorter than people think.


def step_warnings(train: Train, batch: PlannedBatch, steps: Steps, ranks: int) -> Iterator[str]:
    """Yield a warning, with a better value, for a short run and for what is due after its end."""
    low, value, high = steps.run
    if high < FEW_STEPS and train.until_step is None:
        few = f"{_banded(steps.run)} in all, fewer than {FEW_STEPS}"
        yield f"train.{_key(train)}: {few}; {_more_steps(train, batch, value, ranks)}"
    if train.warmup_steps is not None and train.warmup_steps >= value and low < high:
        yield (
            f"train.warmup_steps: {train.warmup_steps} of {_banded(steps.run)}; "
            f"{max(1, value // 10)} is a tenth"
        )
    for key in (
        "save_every_steps",
        "validate_every_steps",
        "sample_every_steps",
        "profile_every_steps",
        "until_step",
    ):
        every = getattr(train, key)
        is_default = every == Train.model_fields[key].default
        if isinstance(every, int) and not is_default and every > high:
            beyond = f"{every:,} is beyond the end of the run, {_banded(steps.run)}"
            yield f"train.{key}: {beyond}; try {max(1, value // 4)}"


def _key(train: Train) -> str:
    if train.max_steps is not None:
        return "max_steps"
    return "global_batch_tokens" if train.global_batch_samples is None else "global_batch_samples"


def _more_steps(train: Train, batch: PlannedBatch, steps: int, ranks: int) -> str:
    """Return what makes FEW_STEPS steps of the data: a smaller batch if sharable, or epochs."""
    if train.max_steps is not None:
        return f"set train.max_steps to {FEW_STEPS} or more"
    at_once = train.blocks_at_once(ranks)
    blocks = batch.global_batch_blocks * steps // FEW_STEPS // at_once * at_once
    block_tokens = batch.block_tokens
    shorter = ""
    if not blocks:  # a smaller batch takes shorter blocks too
        fitting = batch.tokens_per_step * steps // FEW_STEPS // at_once
        blocks = at_once
        block_tokens = fitting // _BLOCK_UNIT * _BLOCK_UNIT
        shorter = f" with {_SHORTER} {block_tokens:,}"
    epochs = f"train.epochs {math.ceil(train.epochs * FEW_STEPS / steps)}"
    if block_tokens < _LEAST_BLOCK and shorter:
        return f"{epochs} would make {FEW_STEPS}"
    smaller = blocks * block_tokens
    if train.global_batch_samples is not None:
        smaller = max(1, train.global_batch_samples * smaller // batch.tokens_per_step)
    return f"train.{_key(train)} {smaller:,}{shorter} or {epochs} would make {FEW_STEPS}"
