"""The push stage: the model folder on a hub, for which the config asks by name."""

from typing import Any

from pipeline_lib.arch.weight_files import weights_bytes
from pipeline_lib.config.benchmarks import Ship
from pipeline_lib.config.section import read_settings
from pipeline_lib.core.errors import DataError
from pipeline_lib.core.files import write_json
from pipeline_lib.core.stage import Job
from pipeline_lib.core.units import size
from pipeline_lib.export.card import licence_of
from pipeline_lib.hub.repository import Repository
from pipeline_lib.hub.upload import upload
from pipeline_lib.records.benchmark import BENCHMARK_NAME, Benchmarks
from pipeline_lib.records.record import read_record
from pipeline_lib.report.ship import ShipDecision, ship_verdict

PUSHED_NAME = "pushed.json"


def run(job: Job) -> dict[str, Any]:
    """Upload the model folder; write where it is.

    Raises DataError if the rules of `ship` do not let it, and HubError if the hub does not.
    """
    settings = job.spec.settings
    repository = Repository(settings["hub"], "model", settings["repository"])
    _refuse_unshipped(job)
    folder = job.inputs["merge"].folder()
    ref = job.spec.inputs["merge"]
    licence = licence_of(folder)
    job.say(f"push: {size(weights_bytes(folder))} of weights to {repository}")
    page = upload(
        repository,
        folder,
        f"{ref.stage} {ref.digest}",
        "other" if licence is None else licence.name,
        job.run_dir,
    )
    pushed = {"hub": repository.hub, "repository": repository.name, "page": page}
    write_json(job.out / PUSHED_NAME, pushed)
    job.say(f"push: {page}")
    return pushed


def _refuse_unshipped(job: Job) -> None:
    """Raise DataError if `ship` has rules, and the model may not ship by them or it is not known."""
    rules = read_settings(Ship, job.spec.settings.get("ship", {}))
    if "benchmark" not in job.inputs:
        return
    benchmarks = read_record(Benchmarks, job.inputs["benchmark"].file(BENCHMARK_NAME))
    verdict = ship_verdict(rules, benchmarks)
    if verdict is not None and verdict.decision != ShipDecision.SHIP:
        raise DataError(
            f"push: nothing was uploaded: {verdict.text} Change the rules of `ship`, or remove "
            "`push`"
        )
