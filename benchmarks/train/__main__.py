"""All sides of a case in turn: `python -m benchmarks.train CASE ... [--sides ours ...]`.

In full: `python -m benchmarks.train CASE ... [--sides ours ...] [--ranks 1 2 ...] [--out FILE]`. On
the GPUs that are there, or on CPUs; on several numbers of ranks, if they are given, with as much
for each rank to do. Weights are random; weights, documents and batches are the same for all sides.
A line is printed as each side ends, and FILE is written anew.
"""

import argparse
import importlib.metadata
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.groups import NO_MULTICAST, Group, GroupFailed
from benchmarks.sizes import model_config
from benchmarks.train.cases import CASES, OURS, Case, changed, train_settings
from benchmarks.train.documents import lengths_of
from benchmarks.train.report import row_of
from benchmarks.train.table import show_case, show_scaling
from pipeline_lib.core.errors import IntegrityError
from pipeline_lib.core.files import write_json

LOG_LINES = 25
CASE_S = 590.0  # of all sides of a case
LEAST_S = 30.0  # less is not enough to start a side
PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "deepspeed",
    "liger-kernel",
    "trl",
    "nvidia-cudnn-frontend",
)
ENVIRONMENT = {
    **NO_MULTICAST,
    "PYTHONWARNINGS": "ignore",  # they would hide why a side failed
}


@dataclass(frozen=True)
class Race:
    """How the sides of a case are run."""

    case: Case
    changes: Sequence[str]  # to the case
    ranks: int
    steps: int
    side_s: float  # the longest that a side may take, its start counted in

    def run(self, side: str, train: Sequence[str], folder: Path, until_s: float) -> dict[str, Any]:
        """The row of `side`: a peer, or ours with `train` set.

        One that failed has a `problem`, and shows its log. It is ended at `until_s` of the
        monotonic clock.
        """
        write_json(folder / "config.json", model_config(self.case.size, self.case.layers))
        is_ours = side.startswith(OURS)
        steps = (
            self.steps
            if is_ours
            else min(self.steps, self.case.peer(side).most_steps or self.steps)
        )
        module = "benchmarks.train.ours" if is_ours else "benchmarks.train.peers"
        group = Group(
            module,
            self.ranks,
            folder,
            torch.cuda.is_available(),
            self.side_s,
            own=lambda _: ENVIRONMENT,
        )
        arguments = [
            "--case",
            self.case.name,
            "--side",
            side,
            "--folder",
            str(folder),
            "--steps",
            str(steps),
        ]
        arguments += ["--set", *self.changes, "--train", *train]
        told: list[dict[str, Any]] = []
        begin_s, first_s, problem = time.monotonic(), None, None
        try:
            for line in group.rows(arguments, min(until_s, begin_s + self.side_s)):
                told.append(line)
                if line["kind"] == "step" and first_s is None:
                    first_s = time.monotonic() - begin_s
        except GroupFailed as error:
            problem = str(error)
        row = row_of(self.case, side, self.ranks, told, first_s)
        row["seconds"] = time.monotonic() - begin_s
        if problem is not None and not any(line["kind"] == "end" for line in told):
            row["problem"] = problem
            print(
                f"--- {row['name']}: {problem}", *_end_of_log(folder), "---", sep="\n", flush=True
            )
        return row


def _end_of_log(folder: Path) -> list[str]:
    text = (folder / "ranks.log").read_text(errors="replace")
    return [line[:200] for line in text.splitlines() if line.strip()][-LOG_LINES:]


def sides_of(
    case: Case, wanted: Sequence[str], variants: Sequence[str]
) -> Iterator[tuple[str, list[str]]]:
    """The sides asked for, ours first, with changes of our keys: `--variant` adds one of ours."""
    names = [OURS, *(peer.name for peer in case.peers)]
    for name in names:
        if not wanted or name in wanted:
            yield name, []
        if name == OURS:
            for variant in variants:
                yield f"{OURS}: {variant}", variant.split(",")


def summary(row: dict[str, Any]) -> str:
    """A line for people who wait."""
    if "tokens_per_s" not in row:
        return f"{row['name']}: failed after {row['seconds']:.0f} s"
    mfu = f", MFU {row['mfu']:.1%}" if "mfu" in row else ""
    speed = (
        f"{row['tokens_per_s']:,.0f} tokens/s a rank, {row['documents_per_s']:.1f} samples/s{mfu}"
    )
    return f"{row['name']}: {speed}, step {row['step_s']:.3f} s, {row['seconds']:.0f} s in all"


def head() -> dict[str, Any]:
    """What the rows were measured with."""
    installed = {dist.metadata["Name"]: dist.version for dist in importlib.metadata.distributions()}
    return {
        "command": shlex.join(["python", "-m", "benchmarks.train", *sys.argv[1:]]),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: installed[name] for name in PACKAGES if name in installed},
    }


def parse() -> argparse.Namespace:
    """The command line. Ends the process if a side or a key does not exist."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train", description=__doc__)
    parser.add_argument("cases", nargs="+", choices=CASES)
    gpus = torch.cuda.device_count()
    ranks = "one or more numbers of them; by default one for each GPU, 2 on CPUs"
    parser.add_argument("--ranks", type=int, nargs="+", default=[gpus or 2], help=ranks)
    parser.add_argument(
        "--steps", type=int, default=10, help="of which the first three are not counted"
    )
    parser.add_argument(
        "--sides", nargs="+", default=[], help="`ours` and names of peers; all by default"
    )
    parser.add_argument(
        "--train", nargs="+", default=[], metavar="KEY=VALUE", help="keys of our section `train`"
    )
    variant = "one more side of ours for each, with these keys too"
    parser.add_argument("--variant", nargs="+", default=[], metavar="KEY=VALUE,...", help=variant)
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="fields of the cases, as layers=8"
    )
    parser.add_argument(
        "--side-s", type=float, default=150.0, help="the longest that a side may take, in seconds"
    )
    parser.add_argument("--out", type=Path, help="write all rows here, as JSON")
    arguments = parser.parse_args()
    known = {OURS, *(peer.name for name in arguments.cases for peer in CASES[name].peers)}
    if unknown := set(arguments.sides) - known:
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(sorted(known))}")
    try:
        _refuse_misfit(arguments)
    except (TypeError, ValueError, IntegrityError) as error:
        parser.error(str(error))
    return arguments


def _refuse_misfit(arguments: argparse.Namespace) -> None:
    """Raise TypeError, ValueError or IntegrityError for a key that is unknown or does not fit."""
    for case in (changed(CASES[name], arguments.set) for name in arguments.cases):
        lengths_of(case, 0, 1)
        for peer in case.peers:
            is_wanted = not arguments.sides or peer.name in arguments.sides
            if is_wanted and peer.batches != "trl" and case.rank_documents % peer.documents:
                raise ValueError(
                    f"{case.name}: {peer.name} takes {peer.documents} documents at a time, of "
                    "rank_documents"
                )
        for _, train in sides_of(case, arguments.sides, arguments.variant):
            settings = train_settings(case, [*arguments.train, *train])
            if case.rank_blocks % settings.micro_batch_blocks:
                raise ValueError(
                    f"{case.name}: micro_batch_blocks does not divide {case.rank_blocks}"
                )


def main() -> None:
    """Measure the cases that the command line names."""
    arguments = parse()
    rows: list[dict[str, Any]] = []
    for name, ranks in product(arguments.cases, arguments.ranks):
        case = changed(CASES[name], arguments.set)
        race = Race(case, arguments.set, ranks, arguments.steps, arguments.side_s)
        of_case: list[dict[str, Any]] = []
        until_s = time.monotonic() + CASE_S
        for side, variant in sides_of(case, arguments.sides, arguments.variant):
            if time.monotonic() + LEAST_S > until_s:
                print(f"{name}: {side}: no time left", flush=True)
                continue
            with tempfile.TemporaryDirectory() as folder:
                of_case.append(race.run(side, [*arguments.train, *variant], Path(folder), until_s))
            print(summary(of_case[-1]), flush=True)
            if arguments.out:
                write_json(arguments.out, {**head(), "rows": [*rows, *of_case]})
        show_case(f"{name}, {ranks} ranks", of_case)
        rows += of_case
    if len(arguments.ranks) > 1:
        show_scaling(rows)


if __name__ == "__main__":
    main()
