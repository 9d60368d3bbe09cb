"""One rank of two emulated nodes: it measures the link between them, or ways to train over it at several rates.

Started by `benchmarks.network`. The first rank sets the rate; a model is built once for all rates.
"""

import argparse
import json
import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.grid import TIMEOUT_S, cases_in_time, prepare, problem_of
from benchmarks.loopback import DIRECTIONS, Loopback, sent_bytes
from pipeline_lib.base.errors import PipelineError
from pipeline_lib.calibrate.fit import link_of
from pipeline_lib.doctor.exchange import Collective, timed
from pipeline_lib.plan.units import MIB
from pipeline_lib.train.dist import World, die_with_parent, process_group

SIZES_BYTES = {"cuda": (MIB, 16 * MIB, 64 * MIB), "cpu": (MIB // 4, MIB, 8 * MIB)}
SWEEPS = 2
UNSURE = 1.3  # a prediction times this has to fit into what time is left


def set_rate(link: Loopback, world: World, gbit_s: float) -> None:
    """Change the rate while nothing is under way."""
    dist.barrier()
    if world.is_first:
        link.limit(gbit_s)
    dist.barrier()


def measure_link(link: Loopback, world: World, gbit_s: float) -> dict[str, Any]:
    """What a node sends to the other: bytes a second, and seconds until the first of them, in each sweep over sizes."""
    set_rate(link, world, gbit_s)
    sweeps = [_sweep(world.device) for _ in range(SWEEPS)]
    fitted = [link_of([(one.bus_bytes, one.seconds) for one in sweep]) for sweep in sweeps]
    return {
        "name": "link",
        "gbit_s": gbit_s,
        "bytes_s": [rate for rate, _ in fitted],
        "latency_s": [latency for _, latency in fitted],
        "points": {f"{one.kind} {one.size_bytes}": one.seconds for one in sweeps[-1]},
    }


def _sweep(device: torch.device) -> list[Collective]:
    """On two nodes of one rank the bytes of the bus are those that a node sends."""
    ranks, found = dist.get_world_size(), []
    for size_bytes in SIZES_BYTES[device.type]:
        values = torch.zeros(size_bytes // 4, device=device)
        part = torch.zeros(size_bytes // 4 // ranks, device=device)
        calls = {
            "all_reduce": partial(dist.all_reduce, values),
            "all_gather": partial(dist.all_gather, [torch.empty_like(part) for _ in range(ranks)], part),
        }
        for kind, call in calls.items():
            call()
            found.append(Collective(kind, size_bytes, ranks, timed(call, 2, device) / 2))
    return found


def train_over(link: Loopback, case: dict[str, Any], world: World, folder: Path, until_s: float) -> None:
    """Print what a step takes at each rate; the first rank tells when there is no time left for one."""
    ready = prepare(case, world, folder)
    for _ in range(case["warm_steps"]):
        ready.step()
    for number, rate in enumerate(case["rates"]):
        begun = {"name": case["name"], "gbit_s": rate["gbit_s"], "ends_case": number == len(case["rates"]) - 1}
        is_late = time.monotonic() + UNSURE * rate["expected_s"] > until_s
        agreed = torch.tensor(float(is_late), device=world.device)
        dist.broadcast(agreed, 0)
        if agreed.item():
            found: dict[str, Any] = {"skipped": "no time was left"}
        else:
            set_rate(link, world, rate["gbit_s"])
            before = sent_bytes()
            rows = [ready.step() for _ in range(rate["steps"])]
            sent = (sent_bytes() - before) / DIRECTIONS / rate["steps"]
            names = ("step_s", "forward_s", "backward_s", "update_s")
            found = {name: statistics.fmean(row[name] for row in rows) for name in names}
            found |= {"sent_bytes": sent, "all_step_s": [round(row["step_s"], 4) for row in rows]}
        if world.is_first:
            print(json.dumps({**begun, **found}), flush=True)


def main() -> None:
    """Do what the command line asks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=Path)
    parser.add_argument("--link", type=float, nargs="*", help="Gbit/s to measure the link at")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/network"))  # noqa: S108
    parser.add_argument("--limit-s", type=float, default=500)
    parser.add_argument("--tc", default="tc")
    arguments = parser.parse_args()
    die_with_parent()
    until_s = time.monotonic() + arguments.limit_s
    world, link = World.from_env(os.environ, "cuda" if torch.cuda.is_available() else "cpu"), Loopback(arguments.tc)
    with process_group(world, TIMEOUT_S):
        for gbit_s in arguments.link or ():
            found = measure_link(link, world, gbit_s)
            if world.is_first:
                print(json.dumps(found), flush=True)
        for case in cases_in_time(arguments.cases, world, arguments.limit_s) if arguments.cases else ():
            try:
                train_over(link, case, world, arguments.folder, until_s)
            except (RuntimeError, ValueError, PipelineError) as error:
                print(json.dumps({"name": case["name"], "rank": world.rank, "problem": problem_of(error)}), flush=True)
                os._exit(1)
            finally:
                if world.is_first:
                    link.free()


if __name__ == "__main__":
    main()
