"""Emulated nodes on a machine over a slow network: strategies, predicted and measured, beside one.

`python -m benchmarks.network --nodes 2 --gpus 2 --gbit 10 --out DIR` as root on a machine with as
many GPUs: NCCL is told which ranks share a host, so that others are reached over sockets, and these
are slowed down to so many Gbit/s of a node in each direction. What a node then really sends is
measured first and given to the plan, whose predictions are written down before any training. What
would take a step of more than --bound-s is predicted only, and so is all that no time is left for.
"""

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.groups import Group, Row, measured
from benchmarks.loopback import Loopback
from benchmarks.network_cases import STRATEGIES, Bench, Key, Nodes, expanded, with_link
from benchmarks.network_table import leave
from benchmarks.predictions import WAYS, machine_for, measured_of
from benchmarks.sizes import config_json
from benchmarks.train.cases import parsed
from pipeline_lib.arch.families import geometry_in
from pipeline_lib.core.files import write_json
from pipeline_lib.core.units import brief, gbit_per_s
from pipeline_lib.plan.predict import Prediction
from pipeline_lib.records.record import to_json

SILENCE_S = 150.0
START_S, BUILD_S = 14.0, 8.0  # of a process group; and of a model, its first steps counted in
ONE_NODE_S = 90.0  # the longest that one node may take


def write_predictions(
    path: Path,
    bench: Bench,
    links: Sequence[Row],
    predicted: Mapping[Key, Prediction],
    cases: Sequence[Row],
) -> None:
    """All that is claimed, with the time of claiming it."""
    claims = [
        {**vars(key), "prediction": to_json(prediction.planned())}
        for key, prediction in predicted.items()
    ]
    machines = {
        gbit_s: to_json(machine.planned(0, 0))
        for gbit_s, machine in bench.machines.items()
        if gbit_s is not None
    }
    when = datetime.now(UTC).isoformat(timespec="seconds")
    content = {"written_at": when, "links": list(links), "machines": machines, "cases": list(cases)}
    write_json(path, {**content, "predictions": claims})


def expected_s(cases: Sequence[Row]) -> float:
    """Seconds that measuring will take, if all goes as predicted."""
    groups = 1 + sum(str(case["train"]["strategy"]).startswith("zero") for case in cases)
    steps_s = sum(float(rate["expected_s"]) for case in cases for rate in case["rates"])
    return groups * START_S + len(cases) * BUILD_S + steps_s


def measure_links(
    group: Group, gbits: Sequence[float], arguments: Sequence[str], until_s: float
) -> list[Row]:
    """What a node sends at each rate."""
    found = []
    for row in group.rows(["--link", *map(str, gbits), *arguments], until_s):
        found.append(row)
        rates = ", ".join(gbit_per_s(rate) for rate in row["bytes_s"])
        latency = ", ".join(brief(each) for each in row["latency_s"])
        print(
            f"link at {row['gbit_s']:g} Gbit/s: a node sends {rates}; latency {latency}", flush=True
        )
    return found


def command_line() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.network", description=__doc__)
    parser.add_argument("--nodes", type=int, default=2, help="emulated")
    parser.add_argument(
        "--gpus", type=int, default=1, help="of each of them; ranks, where there are no GPUs"
    )
    parser.add_argument(
        "--gbit", type=float, nargs="+", default=[10, 4, 1], help="of a node, in each direction"
    )
    parser.add_argument("--size", choices=WAYS, default="1.7B")
    parser.add_argument(
        "--layers", type=int, help="fewer than the model has, so that slow links take no hours"
    )
    parser.add_argument("--vocabulary", type=int, help="a smaller one, for the same reason")
    parser.add_argument("--micro", type=int, default=2, help="blocks that a rank takes at a time")
    parser.add_argument(
        "--accumulation", type=int, nargs="+", default=[2, 16], help="micro-batches of a step"
    )
    parser.add_argument("--strategies", nargs="*", default=[], help="names; all by default")
    parser.add_argument("--train", nargs="*", default=[], metavar="KEY=VALUE", help="of every run")
    parser.add_argument(
        "--measured",
        type=Path,
        nargs="*",
        default=[],
        help="cluster.json of calibrate, one or more",
    )
    parser.add_argument("--gpu", default="h200", help="kind of the GPUs, where there are any")
    parser.add_argument("--tc", default="tc", help="iproute2's")
    parser.add_argument(
        "--bound-s", type=float, default=25, help="steps that would take longer are predicted only"
    )
    parser.add_argument("--limit-s", type=float, default=290, help="of the whole")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--logs", type=Path, help="folder for what the ranks say; one in --out by default"
    )
    return parser.parse_args()


def main() -> None:
    """Measure the link, predict, write that down, measure one node and all of them, and compare."""
    arguments = command_line()
    link = Loopback(str(arguments.tc))
    link.free()
    try:
        run(arguments, time.monotonic() + arguments.limit_s)
    finally:
        link.free()


def run(arguments: argparse.Namespace, until_s: float) -> None:
    """All but the cleaning up."""
    is_gpu = torch.cuda.is_available()
    out = arguments.out
    gbits = sorted(arguments.gbit, reverse=True)
    out.mkdir(parents=True, exist_ok=True)
    nodes, logs = Nodes(arguments.nodes, arguments.gpus), arguments.logs or out / "logs"
    silence_s = max(SILENCE_S, 3 * arguments.bound_s)
    module = "benchmarks.network_rank"
    all_of = Group(module, nodes.ranks, logs, is_gpu, silence_s, own=nodes.environment)
    alone = Group(module, nodes.gpus, logs, is_gpu, silence_s, own=nodes.environment)
    common = ["--tc", arguments.tc, "--nodes", str(nodes.count)]
    links = measure_links(all_of, gbits, common, until_s)
    bench = bench_of(arguments, nodes, links, is_gpu)
    predicted = bench.predictions([None, *gbits])
    cases = {
        place: bench.cases(predicted, rates) for place, rates in ((alone, [None]), (all_of, gbits))
    }
    everything = [case for of_place in cases.values() for case in of_place]
    write_predictions(out / "predictions.json", bench, links, predicted, everything)
    print(
        f"predictions in {out / 'predictions.json'}; measuring will take "
        f"{brief(expected_s(everything))}",
        flush=True,
    )
    rows: dict[Key, Row] = {}
    for place, of_place in cases.items():
        end_s = min(until_s, time.monotonic() + ONE_NODE_S) if place is alone else until_s
        for row in measured(place, of_place, end_s, common):
            here = [key for key in predicted if (key.gbit_s is None) == (place is alone)]
            rows = {**expanded(row, here), **rows}  # what a case has shown before it failed stays
            leave(out, bench, predicted, rows)
            what = row.get("problem") or row.get("skipped") or f"{row['step_s']:.3f} s"
            print(f"{row['name']}, {place_of(row)}: {what}", flush=True)
    print(leave(out, bench, predicted, rows))


def place_of(row: Row) -> str:
    """`10 Gbit/s, 2 micro-batches`."""
    if "accumulation" not in row:
        return "all"
    network = "one node" if row["gbit_s"] is None else f"{row['gbit_s']:g} Gbit/s"
    return f"{network}, {row['accumulation']} micro-batches"


def bench_of(
    arguments: argparse.Namespace, nodes: Nodes, links: Sequence[Row], is_gpu: bool
) -> Bench:
    """What all cases share, the network as it was measured."""
    gpu = arguments.gpu if is_gpu else None
    path = measured_of(arguments.measured, geometry_in(config_json(arguments.size)), "full")
    machines = {
        row["gbit_s"]: with_link(
            machine_for(nodes.count, nodes.gpus, gpu, path, internode_gbit_s=row["gbit_s"]), row
        )
        for row in links
    }
    wanted = {"num_hidden_layers": arguments.layers, "vocab_size": arguments.vocabulary}
    chosen = [
        one for one in STRATEGIES if not arguments.strategies or one.name in arguments.strategies
    ]
    if find_spec("deepspeed") is None:
        print("DeepSpeed is not installed: zero1, zero2 and zero3 are left out", flush=True)
        chosen = [one for one in chosen if not one.name.startswith("zero")]
    if nodes.gpus == 1:  # a replica of one rank is what ddp has
        chosen = [one for one in chosen if one.name != "hsdp"]
    return Bench(
        size=arguments.size,
        config={key: value for key, value in wanted.items() if value is not None},
        micro=arguments.micro,
        accumulations=tuple(sorted(arguments.accumulation)),
        nodes=nodes,
        machines={None: machine_for(1, nodes.gpus, gpu, path), **machines},
        strategies=tuple(chosen),
        common=parsed(arguments.train),
        bound_s=arguments.bound_s,
    )


if __name__ == "__main__":
    if os.geteuid() != 0:
        raise SystemExit("slowing a device down needs root")
    main()
