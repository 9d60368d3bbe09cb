"""The launcher's side of tracking: start a run's trackers as processes; hand over the final report.

Each tracker has a process of its own, so that its failure does not disturb training.
"""

import importlib.util
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline_lib.config.compile import run_digest
from pipeline_lib.core.errors import BUG, PipelineError
from pipeline_lib.core.files import read_json, write_json
from pipeline_lib.core.run_folder import PLAN_NAME
from pipeline_lib.core.stage import Say
from pipeline_lib.core.store import Spec, Store
from pipeline_lib.core.text import how_to_install, redact
from pipeline_lib.records.plan import read_plan_of_training
from pipeline_lib.tracking.settings import numbers_in
from pipeline_lib.tracking.trackers import FinishedReport

FOLDER = "tracking"
FINISH_S = 20.0
HURRY_S = 3.0  # after a failure or a stop, when the user waits for the reason
LOG_BYTES = 2000


@contextmanager
def trackers(
    tracking: Mapping[str, Any],
    run_dir: Path,
    plan_dir: Path,
    say: Say,
    finish_s: float | None = None,
) -> Iterator[None]:
    """Feed the trackers that `tracking` names while the block runs; skip any that cannot start.

    At the end of the block all trackers together have `finish_s` (default FINISH_S) seconds to
    finish, or HURRY_S if the block raised.
    """
    children: list[Child] = []
    patience_s = HURRY_S
    try:
        for name in tracking["to"]:
            if importlib.util.find_spec(name) is None:
                say(f"tracking: {name} is not installed, so it is left out: {how_to_install(name)}")
                continue
            try:
                children.append(Child(name, run_dir, plan_dir, say))
            except OSError as error:
                say(f"tracking: {name} cannot be started, so it is left out ({redact(str(error))})")
        yield
        patience_s = FINISH_S if finish_s is None else finish_s
    finally:
        for child in children:
            child.ask_to_finish()
        deadline_s = time.monotonic() + patience_s
        for child in children:
            child.finish(deadline_s, patience_s)


class Child:
    """The process of one tracker. The end of its standard input signals the end of the run."""

    def __init__(self, name: str, run_dir: Path, plan_dir: Path, say: Say) -> None:
        """Start the process; its output goes to a log beside its files. Raises OSError."""
        self._name, self._say, self._is_stopped = name, say, False
        self._log = run_dir / FOLDER / f"{name}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pipeline_lib", "track", "--to", name]
        command += ["--run-dir", str(run_dir), "--plan", str(plan_dir)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        """Wait for the process; report once if it fails."""
        code = self._process.wait()
        if code and not self._is_stopped:
            lines = (
                self._log.read_bytes()[-LOG_BYTES:].decode("utf-8", "replace").strip().splitlines()
            )
            errors = [line for line in lines if line.strip() and not line.startswith(BUG)]
            reason = redact(errors[-1]) if errors else f"code {code}"
            self._say(
                f"tracking: {self._name} failed and is left out ({reason}; more in {self._log})"
            )

    def ask_to_finish(self) -> None:
        """Close the process's standard input, which signals the end of the run."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def finish(self, deadline_s: float, patience_s: float) -> None:
        """Wait for the process until `deadline_s` on the monotonic clock, then kill it.

        `patience_s`, the seconds it had to finish, is for the message.
        """
        self._watcher.join(max(0.0, deadline_s - time.monotonic()))
        if self._watcher.is_alive():
            self._is_stopped = True
            self._say(f"tracking: {self._name} did not finish in {patience_s:.0f} s and is stopped")
            self._process.kill()
            self._watcher.join()


# Handover: the report of a finished experiment goes to the trackers of its training, into the same
# run.

PAGE_NAME, FACTS_NAME = "report.html", "report.json"
PATIENCE_S = 120.0  # some trackers write the whole run again


def hand_over(spec: Spec, store: Store, page_name: str, summary_name: str, say: Say) -> None:
    """Give the sealed report of `spec` to the trackers of its training.

    Problems are only reported through `say`: the report itself is complete.
    """
    sealed = store.sealed(spec.ref)
    training = store.sealed(spec.inputs["train"])
    try:
        plan = read_plan_of_training(training / PLAN_NAME)
        if plan is None:
            say("tracking: earlier code planned the training, so the report stays out of trackers")
            return
        wanted = plan.tracking.to
        if not wanted:
            return
        if plan.experiment != spec.settings["experiment"]:
            say(
                f"tracking: the training is shown as that of {plan.experiment}, and its report "
                "stays that one's"
            )
            return
        train = store.read_spec(store.spec_path(spec.inputs["train"].digest))
        run_dir = store.run_dir(run_digest(train))
        known = [name for name in wanted if (run_dir / FOLDER / name).is_dir()]
        if missing := [name for name in wanted if name not in known]:
            say(
                f"tracking: {run_dir} has no run of {', '.join(missing)}, so the report goes to "
                "none"
            )
        if not known:
            return
        keep_report(run_dir, spec.digest, sealed / page_name, read_json(sealed / summary_name))
        with trackers({"to": known}, run_dir, training, say, PATIENCE_S):
            pass
    except (PipelineError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        say(
            f"tracking: the report goes to no tracker ({type(error).__name__}: "
            f"{redact(str(error))})"
        )


def keep_report(run_dir: Path, digest: str, page: Path, summary: dict[str, Any]) -> None:
    """Copy the report to the trackers' folder, for all trackers that show this run from now."""
    folder = run_dir / FOLDER
    shutil.copyfile(page, folder / PAGE_NAME)
    write_json(
        folder / FACTS_NAME, {"digest": digest, "numbers": numbers_in(summary["eval"], "eval")}
    )


def kept_report(run_dir: Path) -> FinishedReport | None:
    """Return the report that `keep_report` stored last, or None."""
    folder = (run_dir / FOLDER).absolute()
    if not (folder / FACTS_NAME).exists():
        return None
    return FinishedReport(page=folder / PAGE_NAME, **read_json(folder / FACTS_NAME))
