"""The plan's network held against a slow one: two emulated nodes of one GPU each, every strategy at several rates.

`python -m benchmarks.network --gbit 10 4 1 --size 1.7B --out DIR` as root on a machine with two GPUs: NCCL is told
that they are of different hosts, so that it takes sockets, and these are slowed down to so many Gbit/s in each
direction. What a node then really sends is measured first and given to the plan, whose predictions are written down
before any training.
"""

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from benchmarks.comparison import beside, figures, number, percent, yes
from benchmarks.grid import config_json
from benchmarks.groups import Group, Row, measured
from benchmarks.loopback import Loopback
from benchmarks.predictions import (
    BLOCK_TOKENS,
    USUAL_BLOCK_TOKENS,
    WAYS,
    machine_for,
    measured_of,
    train_of,
    workload_of,
)
from pipeline_lib.base.fsio import write_json, write_text
from pipeline_lib.calibrate.fit import rate_of
from pipeline_lib.config.schema import Train, settings_of
from pipeline_lib.plan.choice import Setting
from pipeline_lib.plan.compute import shape_of
from pipeline_lib.plan.geometry import Geometry
from pipeline_lib.plan.machine import Machine, Rate
from pipeline_lib.plan.prediction import Prediction
from pipeline_lib.plan.units import GIGA, gbit_per_s, seconds

NODES = 2
LOCAL_STEPS = 8
LONG_STEP_S = 6.0  # one of these is enough: the network decides, and it is steady
SILENCE_S = 150.0
START_S, BUILD_S = 14.0, 4.0  # of a process group, and of a model
TIME_GOAL, AS_FAST = 0.15, 0.05
WARM_STEPS = {"powersgd": 3}  # after two steps that exchange everything
USUAL_WARM_STEPS = 1

COLUMNS = (
    *("strategy", "Gbit/s", "step s predicted", "measured", "error", "forward/backward/update"),
    *("GB sent predicted", "measured", "in band"),
)

Predicted = Mapping[str, Mapping[float, Prediction]]  # by strategy, by Gbit/s
Rows = dict[tuple[str, float], Row]


@dataclass(frozen=True)
class Strategy:
    """One to compare: what of `train` it sets, and the updates between two exchanges."""

    name: str
    changes: Mapping[str, Any]
    period: int = 1


STRATEGIES = (
    Strategy("ddp", {"strategy": "ddp"}),
    Strategy("fsdp", {"strategy": "fsdp"}),
    Strategy("ddp, bf16", {"strategy": "ddp", "gradient_compression": "bf16"}),
    Strategy("ddp, powersgd", {"strategy": "ddp", "gradient_compression": "powersgd"}),
    Strategy("ddp, local SGD", {"strategy": "ddp", "local_sgd_steps": LOCAL_STEPS}, LOCAL_STEPS),
    *(Strategy(name, {"strategy": name}) for name in ("zero1", "zero2", "zero3")),
)


@dataclass(frozen=True)
class Bench:
    """What all cases share; `machines` are the same two nodes, by the Gbit/s between them."""

    size: str
    config: Row
    micro: int
    accumulation: int
    machines: dict[float, Machine]

    @property
    def block_tokens(self) -> int:
        """Of the blocks."""
        return BLOCK_TOKENS.get(self.size, USUAL_BLOCK_TOKENS)

    def train(self, strategy: Strategy) -> Train:
        """The section `train` of a run."""
        changes = dict(strategy.changes)
        return train_of(changes.pop("strategy"), "full", self.micro, "none", **changes)

    def predict(self, strategy: Strategy, gbit_s: float) -> Prediction:
        """What the plan says of it."""
        blocks = self.micro * self.accumulation
        geometry = Geometry.from_config(config_json(self.size, self.config))
        workload = workload_of(self.block_tokens, blocks, NODES)
        machine = known_layers(self.machines[gbit_s], geometry)
        return Setting(geometry, machine, workload, blocks * NODES, None).predict(self.train(strategy))

    def case(self, strategy: Strategy, predicted: Mapping[float, Prediction]) -> Row:
        """What the ranks are told. Slow steps are taken once."""
        train = self.train(strategy)
        rates = []
        for gbit_s, prediction in predicted.items():
            steps = strategy.period if strategy.period > 1 else 1 if prediction.step_s.value > LONG_STEP_S else 2
            rates.append({"gbit_s": gbit_s, "steps": steps, "expected_s": prediction.step_s.value * steps})
        return {
            **{"name": strategy.name, "size": self.size, "config": self.config, "block_tokens": self.block_tokens},
            "accumulation": self.accumulation,
            "train": {**settings_of(train), "strategy": train.strategy},
            "warm_steps": WARM_STEPS.get(train.gradient_compression, USUAL_WARM_STEPS),
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


def node_of(rank: int) -> dict[str, str]:
    """What makes a rank a node of its own."""
    return {
        **{"NCCL_HOSTID": f"emulated-node-{rank}", "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1"},
        **{"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"},
    }


def with_link(machine: Machine, row: Row) -> Machine:
    """The nodes with the link as it was measured."""
    rates = {
        f"between_{what}": Rate(**rate_of(row[what]), source="measured over the emulated link")
        for what in ("bytes_s", "latency_s")
    }
    return replace(machine, rates={**machine.rates, **rates})


def write_predictions(
    path: Path, bench: Bench, links: Sequence[Row], predicted: Predicted, cases: Sequence[Row]
) -> None:
    """All that is claimed, with the time of claiming it."""
    claims = {
        name: {gbit_s: prediction.as_json() for gbit_s, prediction in each.items()} for name, each in predicted.items()
    }
    machines = {gbit_s: machine.as_json() for gbit_s, machine in bench.machines.items()}
    when = datetime.now(UTC).isoformat(timespec="seconds")
    content = {"written_at": when, "links": list(links), "machines": machines, "cases": list(cases)}
    write_json(path, {**content, "predictions": claims})


def expected_s(cases: Sequence[Row]) -> float:
    """Seconds that measuring will take, if all goes as predicted."""
    groups = 1 + sum(str(case["train"]["strategy"]).startswith("zero") for case in cases)
    steps_s = sum(float(rate["expected_s"]) for case in cases for rate in case["rates"])
    return groups * START_S + len(cases) * BUILD_S + steps_s


def compared(name: str, gbit_s: float, prediction: Prediction, row: Row | None) -> Row:
    """A prediction beside what came of it."""
    row = row or {"problem": "not measured, no time was left"}
    names = ("forward_s", "backward_s", "update_s")
    return {
        **{"name": name, "gbit_s": gbit_s, "problem": row.get("problem", row.get("skipped"))},
        "time": beside(prediction.step_s, row.get("step_s")),
        "sent": beside(prediction.network_bytes, row.get("sent_bytes")),
        "phases": {phase: beside(getattr(prediction, phase), row.get(phase)) for phase in names},
        "bound": prediction.bound,
        "measured": row,
    }


def table(results: Sequence[Row]) -> list[str]:
    """For people."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for row in results:
        took, sent = row["time"], row["sent"]
        phases = "/".join(percent(phase["error"]) for phase in row["phases"].values())
        cells = [row["name"], f"{row['gbit_s']:g}", figures(took, 1, 2), number(took["measured"], 1, 2)]
        cells += [percent(took["error"]), phases, number(sent["value"], GIGA, 2), number(sent["measured"], GIGA, 2)]
        cells.append(row["problem"][:60] if row["problem"] else yes(took["within_band"]))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def ranking(results: Sequence[Row], gbit_s: float) -> list[str]:
    """The strategies at one rate from the fastest to the slowest, as predicted and as measured."""
    known = [row for row in results if row["gbit_s"] == gbit_s and row["time"]["measured"] is not None]
    if len(known) < 2:
        return []
    agree, wrong = 0, []
    pairs = list(combinations(known, 2))
    for one, other in pairs:
        predicted = one["time"]["value"] - other["time"]["value"]
        times = one["time"]["measured"], other["time"]["measured"]
        agree += 1 if predicted * (times[0] - times[1]) > 0 else -1
        if predicted * (times[0] - times[1]) <= 0 and max(times) > min(times) * (1 + AS_FAST):
            wrong.append(f"{one['name']} / {other['name']}")
    orders = [
        " < ".join(row["name"] for row in sorted(known, key=lambda row: row["time"][key]))
        for key in ("value", "measured")
    ]
    good = sum(abs(row["time"]["error"]) <= TIME_GOAL for row in known)
    verdict = "right" if not wrong else f"WRONG for {'; '.join(wrong)}"
    return [
        f"{gbit_s:g} Gbit/s: {good} of {len(known)} within {TIME_GOAL:.0%}; ranking {verdict} "
        f"(Kendall's tau {agree / len(pairs):.2f})",
        f"  predicted: {orders[0]}",
        f"  measured:  {orders[1]}",
    ]


def measure_links(group: Group, gbits: Sequence[float], tc: str, until_s: float) -> list[Row]:
    """What a node sends at each rate."""
    found = []
    for row in group.rows(["--link", *map(str, gbits), "--tc", tc], until_s):
        found.append(row)
        rates = ", ".join(gbit_per_s(rate) for rate in row["bytes_s"])
        latency = ", ".join(seconds(each) for each in row["latency_s"])
        print(f"link at {row['gbit_s']:g} Gbit/s: a node sends {rates}; latency {latency}", flush=True)
    return found


def main() -> None:
    """Measure the link, predict, write that down, measure the strategies, and compare."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.network", description=__doc__)
    parser.add_argument("--gbit", type=float, nargs="+", default=[10, 4, 1], help="of a node, in each direction")
    parser.add_argument("--size", choices=WAYS, default="1.7B")
    parser.add_argument("--layers", type=int, help="fewer than the model has, so that slow links take no hours")
    parser.add_argument("--vocabulary", type=int, help="a smaller one, for the same reason")
    parser.add_argument("--micro", type=int, default=2, help="blocks that a rank takes at a time")
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--strategies", nargs="*", default=[], help="names; all by default")
    parser.add_argument("--measured", type=Path, nargs="*", default=[], help="cluster.json of calibrate, one or more")
    parser.add_argument("--gpu", default="h200", help="kind of the GPUs, where there are any")
    parser.add_argument("--tc", default="tc", help="iproute2's")
    parser.add_argument("--limit-s", type=float, default=400)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--logs", type=Path, help="folder for what the ranks say; one in --out by default")
    arguments = parser.parse_args()
    link = Loopback(str(arguments.tc))
    link.free()
    try:
        run(arguments, time.monotonic() + arguments.limit_s)
    finally:
        link.free()


def run(arguments: argparse.Namespace, until_s: float) -> None:
    """All but the cleaning up."""
    is_gpu, out, gbits = torch.cuda.is_available(), arguments.out, sorted(arguments.gbit, reverse=True)
    out.mkdir(parents=True, exist_ok=True)
    group = Group(
        "benchmarks.network_rank",
        NODES,
        arguments.logs or out / "logs",
        is_gpu,
        SILENCE_S,
        shares_node=False,
        own=node_of,
    )
    links = measure_links(group, gbits, arguments.tc, until_s)
    gpu = arguments.gpu if is_gpu else None
    path = measured_of(arguments.measured, Geometry.from_config(config_json(arguments.size)), "full")
    machines = {
        row["gbit_s"]: with_link(machine_for(NODES, 1, gpu, path, internode_gbit_s=row["gbit_s"]), row) for row in links
    }
    wanted = {"num_hidden_layers": arguments.layers, "vocab_size": arguments.vocabulary}
    config = {key: value for key, value in wanted.items() if value is not None}
    bench = Bench(arguments.size, config, arguments.micro, arguments.accumulation, machines)
    chosen = [one for one in STRATEGIES if not arguments.strategies or one.name in arguments.strategies]
    if find_spec("deepspeed") is None:
        chosen = [one for one in chosen if not one.name.startswith("zero")]
    predicted = {one.name: {gbit_s: bench.predict(one, gbit_s) for gbit_s in gbits} for one in chosen}
    cases = [bench.case(one, predicted[one.name]) for one in chosen]
    write_predictions(out / "predictions.json", bench, links, predicted, cases)
    print(f"predictions in {out / 'predictions.json'}; measuring will take {seconds(expected_s(cases))}", flush=True)
    rows: Rows = {}
    for row in measured(group, cases, until_s, ["--tc", arguments.tc]):
        for gbit_s in [row["gbit_s"]] if "gbit_s" in row else gbits:
            rows.setdefault((row["name"], gbit_s), row)
        leave(out, predicted, rows)
        what = row.get("problem") or row.get("skipped") or f"{row['step_s']:.3f} s"
        print(f"{row['name']}, {row.get('gbit_s', 'all')} Gbit/s: {what}", flush=True)
    print(leave(out, predicted, rows))


def leave(out: Path, predicted: Predicted, rows: Rows) -> str:
    """Write down what is known so far; the table with what follows from it."""
    gbits = list(dict.fromkeys(gbit_s for each in predicted.values() for gbit_s in each))
    pairs = [(name, gbit_s) for gbit_s in gbits for name in predicted]
    results = [compared(name, gbit_s, predicted[name][gbit_s], rows.get((name, gbit_s))) for name, gbit_s in pairs]
    text = "\n".join([*table(results), "", *(line for gbit_s in gbits for line in ranking(results, gbit_s))])
    write_json(out / "results.json", results)
    write_text(out / "table.md", text + "\n")
    return text


if __name__ == "__main__":
    if os.geteuid() != 0:
        raise SystemExit("slowing a device down needs root")
    main()
