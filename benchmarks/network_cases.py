"""What is tried over the emulated network: strategies, nodes, and what ranks hear of a case."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.groups import NO_MULTICAST, Row
from benchmarks.predictions import BLOCK_TOKENS, USUAL_BLOCK_TOKENS, train_of, workload_of
from benchmarks.sizes import config_json
from pipeline_lib.arch.families import geometry_in
from pipeline_lib.arch.geometry import Geometry
from pipeline_lib.calibrate.fits import rate_of
from pipeline_lib.config.section import settings_of
from pipeline_lib.config.train import Train
from pipeline_lib.plan.case import Case as PlanCase
from pipeline_lib.plan.machine import Machine
from pipeline_lib.plan.passes import shape_of
from pipeline_lib.plan.predict import Prediction, predict_step
from pipeline_lib.plan.workload import settled
from pipeline_lib.records.plan import Rate

LONG_STEP_S = 3.0  # one of these is enough: the network decides, and it is steady
# the longest of one node, whose speed hardly depends on how much more a step accumulates
ALONE_STEP_S = 8.0
USUAL_STEPS = 2
WARM_STEPS = {"powersgd": 3}  # after two steps that exchange everything
USUAL_WARM_STEPS = 1
COMMON = {"compile": False}  # which would take a minute for each case
ALONE = ("ddp", "fsdp")  # what one node is measured with; the better of them is its speed


@dataclass(frozen=True)
class Strategy:
    """One to compare: what of `train` it sets, and the updates between two exchanges.

    What is measured is `measured_as`: of local SGD a step that exchanges nothing, and what an
    exchange adds to it, so that one measurement serves every period.
    """

    name: str
    changes: Mapping[str, Any]
    period: int = 1
    measured_as: str = ""

    @property
    def case(self) -> str:
        """The name of the case that measures it."""
        return self.measured_as or self.name


def _local_sgd(period: int) -> Strategy:
    return Strategy(
        f"ddp, local SGD {period}",
        {"strategy": "ddp", "local_sgd_steps": period},
        period,
        "ddp, local SGD",
    )


# The likeliest to be fast first, for where time runs out.
STRATEGIES = (
    Strategy("ddp, powersgd", {"strategy": "ddp", "gradient_compression": "powersgd"}),
    _local_sgd(8),
    _local_sgd(64),
    *(
        Strategy(f"{name}, bf16", {"strategy": name, "gradient_compression": "bf16"})
        for name in ("ddp", "hsdp", "fsdp", "zero3", "zero1", "zero2")
    ),
    *(
        Strategy(name, {"strategy": name})
        for name in ("hsdp", "ddp", "fsdp", "zero3", "zero1", "zero2")
    ),
)


@dataclass(frozen=True)
class Nodes:
    """Emulated ones, and the GPUs of each. Ranks that follow each other share a node."""

    count: int
    gpus: int

    @property
    def ranks(self) -> int:
        """Of all nodes."""
        return self.count * self.gpus

    def environment(self, rank: int) -> dict[str, str]:
        """What makes `rank` its node's; it keeps the GPU of its number, on this one machine."""
        return {
            **{
                "NCCL_HOSTID": f"emulated-node-{rank // self.gpus}",
                "NCCL_NET": "Socket",
                "NCCL_IB_DISABLE": "1",
            },
            **{
                "NCCL_SOCKET_IFNAME": "lo",
                "GLOO_SOCKET_IFNAME": "lo",
                "LOCAL_WORLD_SIZE": str(self.gpus),
            },
            **NO_MULTICAST,
        }


@dataclass(frozen=True)
class Key:
    """A cell of the table: a strategy, a node's Gbit/s (None: one node), micro-batches a step."""

    name: str
    gbit_s: float | None
    accumulation: int


@dataclass(frozen=True)
class Bench:
    """What all cases share; `machines` are nodes by the Gbit/s between them, by None one."""

    size: str
    config: Row
    micro: int
    accumulations: tuple[int, ...]
    nodes: Nodes
    machines: dict[float | None, Machine]
    strategies: tuple[Strategy, ...]
    common: dict[str, Any]
    bound_s: float

    @property
    def block_tokens(self) -> int:
        """Of the blocks."""
        return BLOCK_TOKENS.get(self.size, USUAL_BLOCK_TOKENS)

    def rank_tokens(self, accumulation: int) -> int:
        """That a rank takes in a step."""
        return self.micro * accumulation * self.block_tokens

    def train(self, strategy: Strategy) -> Train:
        """The section `train` of a run."""
        changes = {**COMMON, **self.common, **strategy.changes}
        if changes["strategy"] == "zero3":
            changes["compile"] = False  # it refuses to
        return train_of(changes.pop("strategy"), "full", self.micro, "none", **changes)

    def _on(self, gbit_s: float | None) -> list[Strategy]:
        """What is tried there."""
        if gbit_s is not None:
            return list(self.strategies)
        return [Strategy(name, {"strategy": name}) for name in ALONE]

    def predictions(self, gbits: Iterable[float | None]) -> dict[Key, Prediction]:
        """What the plan says of everything."""
        return {
            Key(one.name, gbit_s, accumulation): self._predict(one, gbit_s, accumulation)
            for gbit_s in gbits
            for one in self._on(gbit_s)
            for accumulation in self.accumulations
        }

    def _predict(self, strategy: Strategy, gbit_s: float | None, accumulation: int) -> Prediction:
        blocks, machine = self.micro * accumulation, self.machines[gbit_s]
        geometry = geometry_in(config_json(self.size, self.config))
        workload = workload_of(self.block_tokens, blocks, machine.ranks)
        machine = known_layers(machine, geometry)
        train = settled(self.train(strategy), machine.has_triton)
        return predict_step(PlanCase(geometry, train, machine, workload, blocks * machine.ranks))

    def cases(
        self, predicted: Mapping[Key, Prediction], gbits: Sequence[float | None]
    ) -> list[Row]:
        """What the ranks are told: one case for all rates and numbers of micro-batches.

        What takes too long is not.
        """
        cases = []
        for strategy in {one.case: one for one in reversed(self._on(gbits[0]))}.values():
            rates = [
                rate
                for gbit_s in gbits
                for accumulation in self.accumulations
                if (rate := self._rate(strategy, predicted, gbit_s, accumulation))["longest_s"]
                <= self._bound_s(gbit_s)
            ]
            if rates:
                # As the plan took it, which settles what `train` leaves open.
                train = predicted[Key(strategy.name, gbits[0], self.accumulations[0])].train
                cases.append(self._case(strategy, train, rates))
        return cases[::-1]

    def _bound_s(self, gbit_s: float | None) -> float:
        return min(self.bound_s, ALONE_STEP_S) if gbit_s is None else self.bound_s

    def _rate(
        self,
        strategy: Strategy,
        predicted: Mapping[Key, Prediction],
        gbit_s: float | None,
        accumulation: int,
    ) -> Row:
        prediction = predicted[Key(strategy.name, gbit_s, accumulation)]
        step_s = prediction.step_s.value
        steps = 1 if step_s > LONG_STEP_S else USUAL_STEPS
        # Of local SGD steps that exchange nothing and, once at each rate, one that does.
        exchange_s = (
            sum(one.seconds for one in prediction.exchanges) * strategy.period
            if strategy.period > 1
            else 0.0
        )
        plain_s = step_s - exchange_s / strategy.period
        wanted = {"gbit_s": gbit_s, "accumulation": accumulation, "steps": steps}
        is_first = accumulation == self.accumulations[0]
        expected_s = steps * plain_s + (plain_s + exchange_s) * (strategy.period > 1 and is_first)
        return {**wanted, "expected_s": expected_s, "longest_s": plain_s + exchange_s}

    def _case(self, strategy: Strategy, train: Train, rates: list[Row]) -> Row:
        return {
            **{
                "name": strategy.case,
                "size": self.size,
                "config": self.config,
                "block_tokens": self.block_tokens,
            },
            "accumulation": max(rate["accumulation"] for rate in rates),
            "train": {**settings_of(train), "strategy": train.strategy},
            "warm_steps": WARM_STEPS.get(train.gradient_compression, USUAL_WARM_STEPS),
            "warm_accumulation": min(rate["accumulation"] for rate in rates),
            "period": strategy.period,
            "rates": rates,
        }


def known_layers(machine: Machine, geometry: Geometry) -> Machine:
    """A layer costs the same whatever the vocabulary: take what was measured at the same widths."""
    shape = shape_of(geometry)
    parts = tuple(
        replace(part, shape=shape) if part.part == "layer" and part.shape[1:] == shape[1:] else part
        for part in machine.measured
    )
    return replace(machine, measured=parts)


def with_link(machine: Machine, row: Row) -> Machine:
    """The nodes with the link as it was measured."""
    rates = {
        f"between_{what}": Rate(**rate_of(row[what]), source="measured over the emulated link")
        for what in ("bytes_s", "latency_s")
    }
    return replace(machine, rates={**machine.rates, **rates})


def expanded(row: Row, keys: Iterable[Key]) -> dict[Key, Row]:
    """A report of ranks by the cells of `keys` that it fills; a failure fills all of its case.

    Of local SGD the exchange's seconds and bytes are shared by the updates of its period.
    """
    strategies = {one.name: one for one in STRATEGIES}
    found = {}
    for key in keys:
        strategy = strategies[key.name]
        is_meant = all(
            row.get(name, getattr(key, name)) == getattr(key, name)
            for name in ("gbit_s", "accumulation")
        )
        if strategy.case != row["name"] or not is_meant:
            continue
        found[key] = row if "exchange_s" not in row else _shared(row, strategy.period)
    return found


def _shared(row: Row, period: int) -> Row:
    """An average step of local SGD: `row` has one without exchange, and what one adds."""
    share_s = row["exchange_s"] / period
    return {
        **row,
        "step_s": row["step_s"] + share_s,
        "update_s": row["update_s"] + share_s,
        "sent_bytes": row["sent_bytes"] + row["exchange_bytes"] / period,
    }
