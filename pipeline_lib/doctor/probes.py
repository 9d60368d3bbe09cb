"""Probes in processes of their own: a driver or a network that hangs costs a deadline, not the report."""

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline_lib.base.errors import BUG
from pipeline_lib.base.redact import shortened
from pipeline_lib.doctor.facts import Section, Unmeasured
from pipeline_lib.doctor.gpus import links
from pipeline_lib.train.launch.environment import LOOPBACK, free_port

_VIA = re.compile(r"\] -> \d+\[[0-9a-f]+\].* via ([A-Za-z0-9/]+)")


def probe(name: str, environ: Mapping[str, str], timeout_s: float, *arguments: str) -> Section:
    """What `python -m pipeline_lib probe NAME` prints. Raises Unmeasured."""
    return run_probes(name, [environ], timeout_s, *arguments)[0]


def run_probes(name: str, environs: Sequence[Mapping[str, str]], timeout_s: float, *arguments: str) -> list[Section]:
    """The same probe in one process for each of `environs`, all of which end within `timeout_s`. Raises Unmeasured."""
    return run_children(["probe", name, *arguments], environs, timeout_s)


def run_children(arguments: Sequence[str], environs: Sequence[Mapping[str, str]], timeout_s: float) -> list[Section]:
    """What `python -m pipeline_lib ARGUMENTS` prints last, a JSON object, in one process for each of `environs`.

    All of them have ended when this returns, within `timeout_s`. Raises Unmeasured with the reason of the first.
    """
    command = [sys.executable, "-m", "pipeline_lib", *arguments]
    deadline_s = time.monotonic() + max(timeout_s, 0.1)
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        outputs = [Path(folder) / str(number) for number in range(len(environs))]
        processes = [_start(command, environ, output) for environ, output in zip(environs, outputs, strict=True)]
        try:
            while any(process.poll() is None for process in processes):
                if any(process.poll() for process in processes):
                    break
                if time.monotonic() > deadline_s:
                    raise Unmeasured(f"it took longer than {timeout_s:.0f} s")
                time.sleep(0.02)
            codes = [process.poll() for process in processes]
        finally:
            for process in processes:
                _end(process)
        # Who was killed comes first: the others may have failed for want of it.
        for code, output in sorted((code, output) for code, output in zip(codes, outputs, strict=True) if code):
            raise Unmeasured(_reason(code, output.with_suffix(".err")))
        return [_answer(output) for output in outputs]


def _reason(code: int, errors: Path) -> str:
    """Why a process failed: what it said last, unless it was killed."""
    return f"process {errors.stem} was ended by signal {-code}" if code < 0 else _last_line(errors, "it failed")


def _start(command: list[str], environ: Mapping[str, str], output: Path) -> "subprocess.Popen[bytes]":
    with output.open("wb") as out, output.with_suffix(".err").open("wb") as err:
        return subprocess.Popen(command, env=dict(environ), stdin=subprocess.DEVNULL, stdout=out, stderr=err)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill it; one that hangs within the system, as on a dead file server, is left to it."""
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(1)


def _last_line(path: Path, otherwise: str) -> str:
    """What a failed process said last; its command line adds only that it was a bug."""
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines()]
    said = [line for line in lines if line and not line.startswith(BUG)]
    return shortened(said[-1].removeprefix("error: "), 300) if said else otherwise


def _answer(output: Path) -> Section:
    lines = output.read_text(errors="replace").splitlines()
    try:
        return dict(json.loads(lines[-1]))
    except (IndexError, ValueError) as error:
        raise Unmeasured("the probe gave no answer") from error


def exchange(environ: Mapping[str, str], device: str, ranks: int, timeout_s: float) -> Section:
    """Bandwidths between `ranks` ranks of this machine, each GPU at work, and what NCCL sends through.

    Raises Unmeasured.
    """
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        common = {**environ, "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
        common |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{folder}/nccl.%p", "OMP_NUM_THREADS": "1"}
        common.setdefault("NCCL_DEBUG_SUBSYS", "INIT,P2P,SHM,NET")
        environs = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        answers = run_probes("exchange", environs, timeout_s, "--device", device)
        logs = "".join(path.read_text(errors="replace") for path in sorted(Path(folder).glob("nccl.*")))
    found: Section = {"ranks": ranks, "device": device, **{k: v for k, v in answers[0].items() if k != "gpu"}}
    if device == "cuda":
        found["transports"] = transports(logs)
        found["gpus_at_work"] = {str(rank): answer["gpu"] for rank, answer in enumerate(answers)}
    return found


def transports(log: str) -> list[str]:
    """What NCCL says it sends through: `P2P/CUMEM`, `SHM/direct`, `NET/Socket/0`, `NET/IB/0`."""
    return sorted(set(_VIA.findall(log)))


def topology(timeout_s: float) -> dict[str, Any]:
    """How the GPUs are connected, from nvidia-smi. Raises Unmeasured."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=max(timeout_s, 0.1), check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise Unmeasured(f"nvidia-smi topo -m: {error}") from error
    return dict(links(done.stdout))
