"""Hands the report of a finished experiment to the trackers that showed its training, as part of the same run."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline_lib.base.errors import PipelineError
from pipeline_lib.base.fsio import read_json, write_json
from pipeline_lib.base.redact import redact
from pipeline_lib.base.run_folder import PLAN_NAME
from pipeline_lib.base.spec import Spec
from pipeline_lib.base.stage import Say
from pipeline_lib.base.store import Store
from pipeline_lib.config.compile import run_digest
from pipeline_lib.tracking.feed import FOLDER, trackers
from pipeline_lib.tracking.tracker import Report

PAGE_NAME, FACTS_NAME = "report.html", "report.json"
PATIENCE_S = 120.0  # some write the whole run anew


def hand_over(spec: Spec, store: Store, page_name: str, summary_name: str, say: Say) -> None:
    """Give the sealed report of `spec` to the trackers of its training. What is wrong is said: the report is made."""
    sealed, training = store.sealed(spec.ref), store.sealed(spec.inputs["train"])
    try:
        plan = read_json(training / PLAN_NAME)
        wanted = plan.get("tracking", {}).get("to")
        if not wanted:
            return
        if plan["experiment"] != spec.settings["experiment"]:
            say(f"tracking: the training is shown as that of {plan['experiment']}, and its report stays that one's")
            return
        train = store.read_spec(store.spec_path(spec.inputs["train"].digest))
        run_dir = store.run_dir(run_digest(train))
        known = [name for name in wanted if (run_dir / FOLDER / name).is_dir()]
        if missing := [name for name in wanted if name not in known]:
            say(f"tracking: {run_dir} has no run of {', '.join(missing)}, so the report goes to none")
        if not known:
            return
        keep_report(run_dir, spec.digest, sealed / page_name, read_json(sealed / summary_name))
        with trackers({"to": known}, run_dir, training, say, PATIENCE_S):
            pass
    except (PipelineError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        say(f"tracking: the report goes to no tracker ({type(error).__name__}: {redact(str(error))})")


def keep_report(run_dir: Path, digest: str, page: Path, summary: dict[str, Any]) -> None:
    """Keep it beside the trackers' files, for all that show this run from now on."""
    folder = run_dir / FOLDER
    shutil.copyfile(page, folder / PAGE_NAME)
    write_json(folder / FACTS_NAME, {"digest": digest, "numbers": dict(_numbers(summary["eval"], "eval"))})


def kept_report(run_dir: Path) -> Report | None:
    """What `keep_report` kept last."""
    folder = (run_dir / FOLDER).absolute()
    if not (folder / FACTS_NAME).exists():
        return None
    return Report(page=folder / PAGE_NAME, **read_json(folder / FACTS_NAME))


def _numbers(summary: dict[str, Any], above: str) -> Iterator[tuple[str, float]]:
    """The numbers of the summary as trackers show them: `eval/tuned/loss`."""
    for name, value in summary.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{above}/{name}")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{above}/{name}", float(value)
