"""Choose how to train: the needs of all legal ways as one table, what fits, and the least of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from pipeline_lib.arch.layers import is_compiled, keeps_on_host
from pipeline_lib.config.strategies import STRATEGIES
from pipeline_lib.config.train import AUTO, Train, in_file
from pipeline_lib.core.errors import DataError
from pipeline_lib.plan.case import Case
from pipeline_lib.plan.context import sharing_counts
from pipeline_lib.plan.legal import OFFLOAD, RECOMPUTE, is_legal, rank_counts, ways_of
from pipeline_lib.plan.machine import End, Machine
from pipeline_lib.plan.near import NEAR, NEAR_ASSUMED, NearMiss, missed
from pipeline_lib.plan.passes import COMPILE_S
from pipeline_lib.plan.predict import Prediction, has_room_on_host, memory_of, predict_step
from pipeline_lib.plan.step_time import step_time
from pipeline_lib.plan.ways import Column, Mask, Ways
from pipeline_lib.records.plan import Memory

# Predictions cannot separate ways to train whose step times differ by less than this fraction; the
# simplest of them is taken. The band is wider on CPUs: what separates strategies (casts, launches,
# overlap) was measured on GPUs.
AS_GOOD, AS_GOOD_ON_CPUS = 0.01, 0.25
# The share of the bad end of the band in what a way costs: as if one run in four went that badly.
# So a way that may be slow, as one over a link of which little is known, has to be faster by much.
_RISK = 0.25
_STRATEGIES = tuple(STRATEGIES)
_AT_ONCE = 16_384  # ways


@dataclass(frozen=True, eq=False)
class WayNeeds:
    """All legal ways of a case, and what each needs: columns of a number for each way."""

    case: Case
    ways: Ways

    @staticmethod
    def of(case: Case, is_lean: bool = False) -> "WayNeeds":
        """Return the needs of all legal ways, or of those that need least memory.

        Ranks of several nodes share a block only if nothing fits where those of one do.
        """
        counts = rank_counts(case)
        within = [count for count in counts if count <= case.ranks.per_node]
        needs = WayNeeds(case, ways_of(case, within or counts, is_lean))
        if within in ([], counts) or needs.fits.any():
            return needs
        return WayNeeds(case, ways_of(case, counts, is_lean))

    @cached_property
    def _of_memory(self) -> Column:
        """Bytes of a GPU, of a node's host and of what is put there, and whether a GPU has them.

        float64[4, ways].
        """
        machine = self.case.machine

        def columns(ways: Ways) -> Column:
            memory = self.case.memory_of(ways)
            host = memory.host_of_node(machine.is_gpu)
            fits = memory.fits_on_gpu(machine.gpu_memory_bytes)
            return np.array([memory.total, host, memory.host, fits])

        return _by_parts(self.ways, columns, 4)

    @property
    def gpu_bytes(self) -> Column:
        """The memory that a GPU needs."""
        needed: Column = self._of_memory[0]
        return needed

    @property
    def host_bytes(self) -> Column:
        """The memory that a node's host needs."""
        needed: Column = self._of_memory[1]
        return needed

    @property
    def put_on_host(self) -> Mask:
        """Whether anything is offloaded."""
        put: Mask = self._of_memory[2] > 0
        return put

    @property
    def fits_on_gpu(self) -> Mask:
        """Whether a GPU has the memory, with the margin."""
        fits: Mask = self._of_memory[3] > 0
        return fits

    def fits_on_host(self, machine: Machine, factor: float = 1.0) -> Mask:
        """Whether a host of `machine`, of `factor` times the size, has the memory.

        An assumed size is only for what is offloaded: it refuses no run that merely has to start.
        """
        limit = machine.host_limit_bytes
        if limit is None:
            return np.ones(len(self.ways), np.bool_)
        has_room = self.host_bytes <= limit * factor
        return has_room | ~self.put_on_host if machine.is_host_assumed else has_room

    @cached_property
    def fits(self) -> Mask:
        """Whether GPUs and hosts have the memory."""
        return self.fits_on_gpu & self.fits_on_host(self.case.machine)

    @cached_property
    def is_near(self) -> Mask:
        """Whether GPUs and hosts lack so little memory that users may know better; or nothing."""
        machine = self.case.machine
        if machine.gpu_memory_bytes is None:
            return self.fits
        factor = 1 + (NEAR_ASSUMED if machine.is_host_assumed else NEAR)
        has_gpu = self.gpu_bytes <= machine.gpu_memory_bytes * (1 + NEAR)
        return self.fits | (has_gpu & self.fits_on_host(machine, factor))

    @cached_property
    def _of_time(self) -> Column:
        """Seconds of a step, expected and at the bad end of the band: float64[2, ways].

        Infinite where much memory lacks.
        """

        def columns(ways: Ways) -> Column:
            ends = (End.EXPECTED, End.BAD)
            return np.array([step_time(self.case, ways, end).total_s for end in ends])

        found = np.full((2, len(self.ways)), np.inf)
        found[:, self.is_near] = _by_parts(self.ways.at(self.is_near), columns, 2)
        return found

    @property
    def step_s(self) -> Column:
        """The expected seconds of a step."""
        expected_s: Column = self._of_time[0]
        return expected_s

    @cached_property
    def cost_s(self) -> Column:
        """What the choice compares: seconds of a step, with risk and its share of compilation."""
        expected_s, bad_s = self._of_time
        steps = self.case.steps
        compiling_s = self.ways.each(is_compiled, "compile") * (COMPILE_S / steps if steps else 0.0)
        cost_s: Column = (1 - _RISK) * expected_s + _RISK * bad_s + compiling_s
        return cost_s

    @cached_property
    def simplicity(self) -> Column:
        """The order of ways that are as good, simplest least: float64[6, ways].

        It is by the ranks to a block, the strategy, what is offloaded, activations on the host,
        recomputation, and resharding.
        """
        places = (
            self.ways.each(lambda train: train.ranks_per_block, "context_ranks"),
            self.ways.each(lambda train: _STRATEGIES.index(train.strategy), "strategy"),
            self.ways.each(lambda train: OFFLOAD.index(train.offload), "offload"),
            self.ways.each(keeps_on_host, "offload_activations", "recompute"),
            self.ways.each(lambda train: RECOMPUTE.index(train.recompute), "recompute"),
            self.ways.each(lambda train: train.reshard is not False, "reshard"),
        )
        return np.array(places)

    def best(self, among: Mask) -> int | None:
        """Return the row of the simplest way as good as the least costly; None if none fits.

        Of ways as simple it is the least costly, and of these the one that keeps most. On CPUs it
        is of the fewest ranks to a block and the simplest strategy that are as good, by a wider
        band.
        """
        rows = np.flatnonzero(among & self.fits)
        if not len(rows):
            return None
        cost_s = self.cost_s[rows]
        order = self.simplicity[:, rows]
        if not self.case.machine.is_gpu:
            as_good = cost_s <= cost_s.min() * (1 + AS_GOOD_ON_CPUS)
            sharing, strategy = order[0], order[1]
            first = np.lexsort((strategy, sharing, ~as_good))[0]
            is_first = (sharing == sharing[first]) & (strategy == strategy[first])
            cost_s = np.where(is_first, cost_s, np.inf)
        as_good = cost_s <= cost_s.min() * (1 + AS_GOOD)
        kept = -self.ways.kept_layers[rows]
        return int(rows[np.lexsort((kept, cost_s, *order[::-1], ~as_good))[0]])

    def leanest(self, among: Mask) -> int:
        """Return the row that lacks least memory: of a host if GPUs have enough, else of a GPU.

        Of those that fit it is one with the fewest ranks to a block.
        """
        rows = np.flatnonzero(among)
        fits = self.fits[rows]
        fits_on_gpu = self.fits_on_gpu[rows]
        lacks_host = fits_on_gpu & ~fits
        needed = np.where(lacks_host, self.host_bytes[rows], self.gpu_bytes[rows])
        sharing = np.where(fits, self.simplicity[0, rows], 0)
        return int(rows[np.lexsort((needed, sharing, ~fits_on_gpu, ~fits))[0]])

    def best_or_leanest(self, among: Mask) -> Prediction:
        """Return the prediction of the best way, or if none fits of the leanest."""
        row = self.best(among)
        return self.predict(self.leanest(among) if row is None else row)

    def nearest(self, faster_than_s: float) -> int | None:
        """Return the row of the fastest way that lacks little and is faster; None if none does.

        Of ways as fast it is the one that lacks least.
        """
        rows = np.flatnonzero(self.is_near & ~self.fits & (self.step_s < faster_than_s))
        if not len(rows):
            return None
        rows = rows[self.step_s[rows] <= self.step_s[rows].min() * (1 + AS_GOOD)]
        host = np.where(self.fits_on_host(self.case.machine), 0.0, self.host_bytes)[rows]
        order = (*self.simplicity[::-1, rows], self.gpu_bytes[rows], host)
        return int(rows[np.lexsort(order)[0]])

    def every(self, strategy: str | None = None) -> Mask:
        """Return the mask of all ways, or of all of one strategy."""
        if strategy is None:
            return np.ones(len(self.ways), np.bool_)
        return self.ways.which(lambda train: train.strategy == strategy, "strategy")

    def strategies(self) -> list[str]:
        """Return the strategies that have a legal way, in order."""
        there = {train.strategy for train in self.ways.kinds}
        return [name for name in _STRATEGIES if name in there]

    def way(self, row: int) -> tuple[Train, Memory]:
        """Return the settings of a way, and the memory of a rank."""
        case = self.case.by(self.ways.train(row))
        copying = case.by(case.train.model_copy(update={"save_async": True}))
        if case.train.save_async != AUTO:
            return case.train, memory_of(case)
        memory = memory_of(copying)
        if case.train.offload == "none" and has_room_on_host(memory, case.machine):
            return copying.train, memory
        waiting = case.by(case.train.model_copy(update={"save_async": False}))
        return waiting.train, memory_of(waiting)

    def predict(self, row: int) -> Prediction:
        """Return the whole prediction of a way."""
        return predict_step(self.case.by(self.way(row)[0]))


def _by_parts(ways: Ways, columns: Callable[[Ways], Column], count: int) -> Column:
    """Return `count` columns of `ways`, computed in parts that stay in the processor's cache."""
    parts = [columns(part) for part in ways.parts(_AT_ONCE)]
    return np.concatenate(parts, axis=1) if parts else np.empty((count, 0))


@dataclass(frozen=True)
class Choice:
    """The chosen way to train, and the best way of every strategy, whether it fits or not.

    If nothing fits, these are the ways that lack least memory. `considered` counts the ways and
    `fitting` those that fit. `left_out` maps each strategy that was not considered to the reason.
    `near` is the fastest that lacks little, if it is faster than the chosen one or if that does not
    fit.
    """

    chosen: Prediction
    best: Mapping[str, Prediction]
    considered: int
    left_out: Mapping[str, str]
    fitting: int = 0
    near: NearMiss | None = None


def choose(case: Case) -> Choice:
    """Choose how to train, over all keys that `free_keys` leaves open.

    If `case.train` names a strategy, the others are only for comparison. Raise DataError if no way
    is legal.
    """
    needs = WayNeeds.of(case)
    if not len(needs.ways):
        raise DataError(no_way(case))
    chosen = needs.best_or_leanest(needs.every())
    beside = needs if case.train.strategy == AUTO else WayNeeds.of(_with_any_strategy(case))
    best = {name: beside.best_or_leanest(beside.every(name)) for name in beside.strategies()}
    limit_s = chosen.step_s.value / (1 + AS_GOOD) if chosen.fits else np.inf
    row = needs.nearest(limit_s)
    return Choice(
        chosen=chosen,
        best={**best, chosen.train.strategy: chosen},
        considered=len(needs.ways),
        left_out=_left_out(case),
        fitting=int(needs.fits.sum()),
        near=None if row is None else missed(needs.predict(row), case.machine),
    )


def _with_any_strategy(case: Case) -> Case:
    """Return the case with the strategy left open, without the keys that belong to its own."""
    open_keys = {"strategy": AUTO, "shard_ranks": None, "reshard": AUTO}
    train = case.train.model_copy(update=open_keys)
    named = ("context_ranks", "micro_batch_blocks", "recompute", "offload", "compile")
    return replace(case, train=train, fixed=[key for key in named if getattr(train, key) != AUTO])


def _left_out(case: Case) -> dict[str, str]:
    reasons = dict(case.geometry.left_out)
    if not case.has_deepspeed:
        of_deepspeed = [name for name, row in STRATEGIES.items() if row.uses_deepspeed]
        reasons = {**dict.fromkeys(of_deepspeed, "DeepSpeed is not installed here"), **reasons}
    return {name: reason for name, reason in reasons.items() if name != case.train.strategy}


def best_way(case: Case) -> Prediction:
    """Return the best legal way of a case, or if none fits the leanest; there has to be one."""
    needs = WayNeeds.of(case)
    return needs.best_or_leanest(needs.every())


def fastest(case: Case) -> Prediction | None:
    """Return what `choose` chooses, and nothing more; None if nothing fits or is allowed."""
    sizes = (case.workload.block_tokens, case.batch_blocks)
    counts = sharing_counts(case.geometry, case.train, case.fixed, case.ranks, *sizes)
    if not counts or not is_legal(case.train, case.ranks):
        return None
    needs = WayNeeds.of(case)
    row = needs.best(needs.every()) if len(needs.ways) else None
    return None if row is None else needs.predict(row)


def leanest(case: Case) -> tuple[Train, Memory] | None:
    """Return the legal way that lacks least memory; None if there is none. It may fit."""
    needs = WayNeeds.of(case, is_lean=True)
    if not len(needs.ways):
        return None
    return needs.way(needs.leanest(needs.every()))


def fits_somehow(case: Case) -> bool:
    """Return whether at least one way to train fits; memory alone is considered."""
    needs = WayNeeds.of(case, is_lean=True)
    return len(needs.ways) > 0 and bool(needs.fits.any())


def no_way(case: Case) -> str:
    """Return the problem if the keys that `auto` has to keep allow no way to train."""
    default = Train()
    keys = [key for key in case.fixed if getattr(case.train, key) != getattr(default, key)]
    given = " and ".join(f"{in_file(key)}: {getattr(case.train, key)}" for key in keys)
    missing = "" if case.has_deepspeed else ", without DeepSpeed, which is not installed here"
    kept = f"beside {given}" if given else "that the other keys of `train` allow"
    return (
        f"train.strategy: auto finds no way to train {kept}{missing}; leave "
        f"{'one' if given else 'some'} out"
    )
