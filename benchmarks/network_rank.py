"""One rank of emulated nodes: it measures their link, or ways to train over it at several rates.

Started by `benchmarks.network`, also for one node alone. The first rank sets the rate; a model is
built once for all rates and numbers of micro-batches. What trains is imported where there is
something to train: it takes seconds.
"""

import argparse
import json
import os
import statistics
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from benchmarks.loopback import DIRECTIONS, Loopback, sent_bytes
from pipeline_lib.calibrate.fits import link_of
from pipeline_lib.core.errors import PipelineError
from pipeline_lib.core.processes import die_with_parent
from pipeline_lib.core.units import MIB
from pipeline_lib.doctor.exchange import Collective, timed
from pipeline_lib.train.dist import World, process_group

if TYPE_CHECKING:
    from benchmarks.grid import Ready
    from pipeline_lib.train.native import Native

TIMEOUT_S = 240
SIZES_BYTES = {"cuda": (MIB, 16 * MIB, 64 * MIB), "cpu": (MIB // 4, MIB, 8 * MIB)}
SWEEPS = 2
UNSURE = 1.3  # a prediction times this has to fit into what time is left


@dataclass(frozen=True)
class Network:
    """The loopback device as the network of so many emulated nodes."""

    link: Loopback
    nodes: int

    def limit(self, world: World, gbit_s: float) -> None:
        """Let each node send so much, while nothing is under way."""
        dist.barrier()
        if world.is_first:  # all that any node sends crosses the one device
            self.link.limit(gbit_s * self.nodes / DIRECTIONS)
        dist.barrier()

    def sent_bytes(self) -> float:
        """By a node, on average, since the machine was started."""
        return sent_bytes() / self.nodes


def measure_link(network: Network, world: World, gbit_s: float) -> dict[str, Any]:
    """What a node sends: bytes a second, and seconds to the first, in each sweep over sizes."""
    # one of each node: others share its network
    speakers = list(range(0, world.size, world.size // network.nodes))
    group = dist.new_group(speakers)
    network.limit(world, gbit_s)
    sweeps = [_sweep(world.device, group) for _ in range(SWEEPS)] if world.rank in speakers else []
    dist.barrier()
    fitted = [link_of([(one.bus_bytes, one.seconds) for one in sweep]) for sweep in sweeps]
    return {
        "name": "link",
        "gbit_s": gbit_s,
        "bytes_s": [rate for rate, _ in fitted],
        "latency_s": [latency for _, latency in fitted],
        "points": {
            f"{one.kind} {one.size_bytes}": one.seconds for sweep in sweeps[-1:] for one in sweep
        },
    }


def _sweep(device: torch.device, group: dist.ProcessGroup | None) -> list[Collective]:
    """On nodes of one rank each, the bytes of the bus are those that a node sends."""
    ranks, found = dist.get_world_size(group), []
    for size_bytes in SIZES_BYTES[device.type]:
        values = torch.zeros(size_bytes // 4, device=device)
        part = torch.zeros(size_bytes // 4 // ranks, device=device)
        calls = {
            "all_reduce": partial(dist.all_reduce, values, group=group),
            "all_gather": partial(
                dist.all_gather, [torch.empty_like(part) for _ in range(ranks)], part, group=group
            ),
        }
        for kind, call in calls.items():
            call()
            found.append(Collective(kind, size_bytes, ranks, timed(call, 2, device) / 2))
    return found


def train_over(
    network: Network, case: dict[str, Any], world: World, folder: Path, until_s: float
) -> None:
    """Print a step's time at each rate; the first rank tells when no time is left for one.

    The model is built and warmed up over the network as it comes.
    """
    from benchmarks.grid import prepare

    ready = prepare(case, world, folder)
    for _ in range(case["warm_steps"]):
        replace(ready, batches=ready.batches[: case["warm_accumulation"]]).step()
    exchanges: dict[
        float, dict[str, float]
    ] = {}  # of local SGD: they do not depend on what is computed
    for number, rate in enumerate(case["rates"]):
        begun = {
            "name": case["name"],
            "gbit_s": rate["gbit_s"],
            "accumulation": rate["accumulation"],
        }
        begun["ends_case"] = number == len(case["rates"]) - 1
        is_late = time.monotonic() + UNSURE * rate["expected_s"] > until_s
        agreed = torch.tensor(float(is_late), device=world.device)
        dist.broadcast(agreed, 0)
        if agreed.item():
            found: dict[str, Any] = {"skipped": "predicted only, no time was left"}
        else:
            if rate["gbit_s"] is not None:
                network.limit(world, rate["gbit_s"])
            now = replace(ready, batches=ready.batches[: rate["accumulation"]])
            found = _steps(network, now, rate["steps"], case["period"])
            if case["period"] > 1:
                if rate["gbit_s"] not in exchanges:
                    exchanges[rate["gbit_s"]] = _exchange(network, now, found, case["period"])
                found |= exchanges[rate["gbit_s"]]
        if world.is_first:
            print(json.dumps({**begun, **found}), flush=True)


def _steps(network: Network, ready: "Ready", steps: int, period: int) -> dict[str, Any]:
    """Seconds and bytes of a step on average; of local SGD of one without an exchange."""
    rows = []
    before = network.sent_bytes()
    for _ in range(steps):
        if period > 1:
            _place(ready, period, 1)
        rows.append(ready.step())
    sent = (network.sent_bytes() - before) / steps
    names = ("step_s", "forward_s", "backward_s", "update_s")
    found: dict[str, Any] = {name: statistics.fmean(row[name] for row in rows) for name in names}
    return {**found, "sent_bytes": sent, "all_step_s": [round(row["step_s"], 4) for row in rows]}


def _exchange(
    network: Network, ready: "Ready", plain: dict[str, Any], period: int
) -> dict[str, float]:
    """What the exchange of local SGD adds to a step that is as `plain` without it."""
    _place(ready, period, period)
    before = network.sent_bytes()
    update_s = ready.step()["update_s"]
    sent = network.sent_bytes() - before
    return {
        "exchange_s": update_s - plain["update_s"],
        "exchange_bytes": sent - plain["sent_bytes"],
    }


def _place(ready: "Ready", period: int, update: int) -> None:
    """Let the next update be that number, from 1, of `period`, after which models meet."""
    strategy = cast("Native", ready.stepper.strategy)
    strategy.updates += period - strategy.updates % period + update - 1


def main() -> None:
    """Do what the command line asks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=Path)
    parser.add_argument("--link", type=float, nargs="*", help="Gbit/s to measure the link at")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/network"))  # noqa: S108
    parser.add_argument("--limit-s", type=float, default=500)
    parser.add_argument("--tc", default="tc")
    parser.add_argument("--nodes", type=int, required=True)
    arguments = parser.parse_args()
    die_with_parent()
    until_s = time.monotonic() + arguments.limit_s
    world = World.from_env(os.environ, "cuda" if torch.cuda.is_available() else "cpu")
    network = Network(Loopback(arguments.tc), arguments.nodes)
    with process_group(world, TIMEOUT_S):
        for gbit_s in arguments.link or ():
            found = measure_link(network, world, gbit_s)
            if world.is_first:
                print(json.dumps(found), flush=True)
        if arguments.cases:
            train_all(network, world, arguments, until_s)


def train_all(
    network: Network, world: World, arguments: argparse.Namespace, until_s: float
) -> None:
    """Print what the cases of the command line take.

    An error ends the process, so that no rank waits for it.
    """
    from benchmarks.grid import cases_in_time, problem_of

    for case in cases_in_time(arguments.cases, world, arguments.limit_s):
        try:
            train_over(network, case, world, arguments.folder, until_s)
        except (RuntimeError, ValueError, PipelineError) as error:
            print(
                json.dumps(
                    {"name": case["name"], "rank": world.rank, "problem": problem_of(error)}
                ),
                flush=True,
            )
            os._exit(1)
        finally:
            if world.is_first:
                network.link.free()


if __name__ == "__main__":
    main()
