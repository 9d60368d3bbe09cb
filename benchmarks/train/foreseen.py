"""`python -m benchmarks.train.foreseen FILE ... --gpu h200`: the plan beside what FILEs measured.

FILEs come from `benchmarks.train`. Of our sides, without calibration. The plan knows what blocks
are like from the documents of the first steps.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.measure import show
from benchmarks.predictions import machine_for, workload_in
from benchmarks.sizes import model_config
from benchmarks.train.cases import CASES, OURS, changed, train_settings
from benchmarks.train.documents import documents_of
from benchmarks.train.ours import batches_of
from pipeline_lib.arch.families import geometry_in
from pipeline_lib.core.files import read_json
from pipeline_lib.core.units import GIB
from pipeline_lib.plan.case import Case as PlanCase
from pipeline_lib.plan.predict import Prediction, predict_step
from pipeline_lib.plan.workload import settled

STEPS = 3  # whose documents are looked at
COLUMNS = (
    "case",
    "GPUs",
    "step s, predicted (band)",
    "measured",
    "error",
    "peak GiB, predicted",
    "measured",
    "error",
)


def foreseen(
    row: dict[str, Any], gpu: str | None, changes: Sequence[str], fields: Sequence[str] = ()
) -> Prediction:
    """The plan's word on a row of ours; `changes` to train, `fields` of the case, as measured."""
    case = replace(changed(CASES[row["case"]], fields), layers=row["layers"])
    variant = row["side"].removeprefix(OURS).removeprefix(": ")
    train = train_settings(case, [*changes, *variant.split(",")] if variant else changes)
    blocks = case.rank_blocks * row["ranks"]
    geometry = geometry_in(model_config(case.size, case.layers))
    taken = [
        documents for rank in range(row["ranks"]) for documents in documents_of(case, rank, STEPS)
    ]
    batches = [
        batch
        for documents in taken
        for batch in batches_of(case, documents, train.micro_batch_blocks)
    ]
    workload = workload_in(batches, case.block_tokens)
    machine = machine_for(1, row["ranks"], gpu, None)
    return predict_step(
        PlanCase(geometry, settled(train, machine.has_triton), machine, workload, blocks)
    )


def cells(row: dict[str, Any], found: Prediction) -> list[str]:
    """A line of the table."""
    step, peak = found.step_s, found.peak_memory_bytes
    return [
        *(row["name"], str(row["ranks"])),
        *(f"{step.value:.3f} ({step.low:.3f} to {step.high:.3f})", f"{row['step_s']:.3f}"),
        f"{step.value / row['step_s'] - 1:+.1%}",
        *(
            f"{peak.value / GIB:.1f}",
            f"{row['peak_bytes'] / GIB:.1f}",
            f"{peak.value / row['peak_bytes'] - 1:+.1%}",
        ),
    ]


def main() -> None:
    """Compare the files that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.train.foreseen", description=__doc__
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--gpu", help="kind of the GPUs, where they were any")
    parser.add_argument(
        "--train", nargs="*", default=[], metavar="KEY=VALUE", help="as it was given when measuring"
    )
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="as it was given when measuring"
    )
    given = parser.parse_args()
    rows = [row for path in given.files for row in read_json(path)["rows"]]
    ours = [row for row in rows if row["side"].startswith(OURS) and "step_s" in row]
    show(
        "the plan",
        COLUMNS,
        [cells(row, foreseen(row, given.gpu, given.train, given.set)) for row in ours],
    )


if __name__ == "__main__":
    main()
