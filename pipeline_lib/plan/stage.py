"""Run the plan stage: predict the run; write plan.json for the launcher and a table for people."""

from importlib.util import find_spec
from typing import Any

from pipeline_lib.arch.families import read_geometry
from pipeline_lib.arch.geometry import Geometry
from pipeline_lib.config.compile import training_of
from pipeline_lib.config.rope import planned_rope
from pipeline_lib.config.schema import Cluster, Tracking
from pipeline_lib.config.section import read_settings
from pipeline_lib.config.train import Train
from pipeline_lib.core.errors import ConfigError, DataError, DiskFull
from pipeline_lib.core.files import write_json, write_text
from pipeline_lib.core.run_folder import PLAN_NAME
from pipeline_lib.core.stage import Job
from pipeline_lib.data.blocks import read_index
from pipeline_lib.plan.answer import Question, answer, run_of
from pipeline_lib.plan.known import BLOCK_SIZES, read_blocks, repetition_in
from pipeline_lib.plan.measured import read_measured
from pipeline_lib.plan.preflight import no_room
from pipeline_lib.plan.show import render
from pipeline_lib.plan.stages import stored_bytes
from pipeline_lib.records.data import BlockIndex
from pipeline_lib.records.record import to_json


def run(job: Job) -> dict[str, Any]:
    """Compute the plan, show it, and write plan.json and plan.txt.

    Raise DataError, ConfigError or DiskFull for what would fail later: model, block length, steps,
    memory, disk. With `strategy: auto` the plan contains the strategy that was chosen.
    """
    settings = job.spec.settings
    shard = job.inputs["shard"].folder(*BLOCK_SIZES)
    model = job.inputs["model"].folder("config.json")
    geometry = read_geometry(model).stretched(planned_rope(settings))
    blocks = read_blocks(shard)
    held_out = read_index(shard / "validation")
    _refuse_misfit(
        geometry, blocks.training, max(blocks.training.largest_token, held_out.largest_token)
    )
    measured = settings.get("measured")
    question = Question(
        experiment=settings["experiment"],
        geometry=geometry,
        train=read_settings(Train, settings["train"]),
        cluster=read_settings(Cluster, settings["cluster"]),
        tracking=read_settings(Tracking, settings["tracking"]),
        workload=blocks.workload,
        blocks=blocks,
        fixed=settings.get("held", ()),
        measured=None if measured is None else read_measured(measured),
        has_deepspeed=find_spec("deepspeed") is not None,
        repetition=repetition_in(job.inputs["tokenize"].manifest),
    )
    found = answer(question)
    plan = found.content
    table = render(plan)
    job.say(table)
    if found.refusal is not None:
        raise ConfigError(f"experiment {plan.experiment!r}", [found.refusal])
    sizes = stored_bytes(run_of(question), is_downloaded=True)
    if problem := no_room(sizes, training_of(job.spec), job.store):
        raise DiskFull(f"{job.store.root}: {problem}")
    write_json(job.out / PLAN_NAME, to_json(plan))
    write_text(job.out / "plan.txt", table + "\n")
    return {"steps": plan.batch.steps, "tokens_per_step": plan.batch.tokens_per_step}


def _refuse_misfit(geometry: Geometry, index: BlockIndex, largest_token: int) -> None:
    for problem in geometry.too_long(index.block_tokens):
        raise DataError(problem)
    if largest_token >= geometry.vocab:
        raise DataError(
            f"the blocks hold token {largest_token}, but the model's vocabulary ends at "
            f"{geometry.vocab - 1}: the "
            "tokenizer in its folder belongs to another model; put the right one there"
        )
