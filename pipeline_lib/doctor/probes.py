"""Probes run in separate processes: a hanging driver or network costs only a deadline."""

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline_lib.core.errors import BUG
from pipeline_lib.core.text import shortened
from pipeline_lib.doctor.facts import Section, Unmeasured
from pipeline_lib.doctor.gpus import links
from pipeline_lib.launch.environment import (
    PLACE_IN_WORLD,
    dist_environment,
    private_rendezvous,
    rank_environments,
)

_VIA = re.compile(r"\] -> \d+\[[0-9a-f]+\].* via ([A-Za-z0-9/]+)")


def probe(name: str, environ: Mapping[str, str], timeout_s: float, *arguments: str) -> Section:
    """Return the output of `python -m pipeline_lib probe NAME`. Raise Unmeasured."""
    return run_children(["probe", name, *arguments], [environ], timeout_s)[0]


def run_children(
    arguments: Sequence[str], environs: Sequence[Mapping[str, str]], timeout_s: float
) -> list[Section]:
    """Return the JSON that `python -m pipeline_lib ARGUMENTS` prints last, for each of `environs`.

    Each runs in its own process, and all are killed before this returns. Raise Unmeasured after
    `timeout_s`, or with the reason of the first process that failed.
    """
    command = [sys.executable, "-m", "pipeline_lib", *arguments]
    deadline_s = time.monotonic() + max(timeout_s, 0.1)
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        outputs = [Path(folder) / str(number) for number in range(len(environs))]
        try:
            for environ, output in zip(environs, outputs, strict=True):
                with output.open("wb") as out, output.with_suffix(".err").open("wb") as err:
                    processes.append(
                        subprocess.Popen(
                            command,
                            env=dict(environ),
                            stdin=subprocess.DEVNULL,
                            stdout=out,
                            stderr=err,
                        )
                    )
            while any(process.poll() is None for process in processes):
                if any(process.poll() for process in processes):
                    break
                if time.monotonic() > deadline_s:
                    raise Unmeasured(f"it took longer than {timeout_s:.0f} s")
                time.sleep(0.02)
            codes = [process.poll() for process in processes]
        finally:
            for process in processes:
                process.kill()
                with suppress(subprocess.TimeoutExpired):
                    # no longer: it may hang in the kernel, as on a dead file server
                    process.wait(1)
        failed = [(code, output) for code, output in zip(codes, outputs, strict=True) if code]
        if failed:
            # A killed process comes first, since the others may have failed because of it.
            code, output = min(failed)
            raise Unmeasured(_why_it_failed(code, output.with_suffix(".err")))
        return [_last_json(output) for output in outputs]


def _why_it_failed(code: int, errors: Path) -> str:
    """Return the signal that ended a process, or its last error line, without our bug note.

    That note is added for bugs.
    """
    if code < 0:
        return f"process {errors.stem} was ended by signal {-code}"
    lines = [line.strip() for line in errors.read_text(errors="replace").splitlines()]
    lines = [line for line in lines if line and not line.startswith(BUG)]
    return shortened(lines[-1].removeprefix("error: "), 300) if lines else "it failed"


def _last_json(output: Path) -> Section:
    lines = output.read_text(errors="replace").splitlines()
    try:
        return dict(json.loads(lines[-1]))
    except (IndexError, ValueError) as error:
        raise Unmeasured("the probe gave no answer") from error


def exchange(environ: Mapping[str, str], device: str, ranks: int, timeout_s: float) -> Section:
    """Return bandwidths between `ranks` ranks here, each GPU under load, and NCCL's transports.

    Raise Unmeasured if a rank fails or the deadline passes.
    """
    with (
        tempfile.TemporaryDirectory(prefix="doctor-") as folder,
        private_rendezvous() as rendezvous,
    ):
        common = {name: value for name, value in environ.items() if name not in PLACE_IN_WORLD}
        common |= {**rendezvous, "OMP_NUM_THREADS": "1"}
        log_nccl(common, folder)
        environs = [dist_environment(made) for made in rank_environments(common, ranks)]
        answers = run_children(["probe", "exchange", "--device", device], environs, timeout_s)
        used = logged_transports(folder)
    found: Section = {"ranks": ranks, "device": device} | answers[0]
    found.pop("gpu", None)
    if device == "cuda":
        found["transports"] = used
        found["gpus_at_work"] = {str(rank): answer["gpu"] for rank, answer in enumerate(answers)}
    return found


def log_nccl(environ: MutableMapping[str, str], folder: str) -> None:
    """Set `environ` so that NCCL writes what it uses into `folder`, one file for each process."""
    environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_FILE=f"{folder}/nccl.%p")
    environ.setdefault("NCCL_DEBUG_SUBSYS", "INIT,P2P,SHM,NET")


def logged_transports(folder: str) -> list[str]:
    """Return the transports in NCCL's logs in `folder`: `P2P/CUMEM`, `SHM/direct` and others.

    Others are `NET/Socket/0` and `NET/IB/0`.
    """
    used: set[str] = set()
    for path in Path(folder).glob("nccl.*"):
        used.update(_VIA.findall(path.read_text(errors="replace")))
    return sorted(used)


def topology(timeout_s: float) -> dict[str, Any]:
    """Return the connections of the GPUs from nvidia-smi. Raise Unmeasured."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "topo", "-m"],
            capture_output=True,
            text=True,
            timeout=max(timeout_s, 0.1),
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise Unmeasured(f"nvidia-smi topo -m: {error}") from error
    return dict(links(done.stdout))
