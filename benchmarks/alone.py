"""A case of a benchmark in a process of its own, as the only rank."""

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

RESULT = "result: "  # before the JSON that a case prints


def started(module: str, case: Any, out: Path, limit_s: float) -> dict[str, Any]:
    """What `python -m MODULE --case` finds in its own process, as its last RESULT line says.

    An `error` if there is none: it failed, or took longer than `limit_s`.
    """
    if limit_s < 20:
        return {"error": "no time was left"}
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    environment = {
        **os.environ,
        **{
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        },
        "PYTORCH_ALLOC_CONF": os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:True"),
    }
    command = [sys.executable, "-m", module, "--out", str(out), "--case", json.dumps(asdict(case))]
    begun_s = time.monotonic()
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=limit_s)
        said, failure = done.stdout, done.stderr.decode().strip()[-2000:] or "nothing said"
    except subprocess.TimeoutExpired as late:
        said, failure = late.stdout or b"", f"took more than {limit_s:.0f} s"
    lines = [line for line in said.decode().splitlines() if line.startswith(RESULT)]
    took = {"case_s": round(time.monotonic() - begun_s, 1)}
    return {**(json.loads(lines[-1].removeprefix(RESULT)) if lines else {"error": failure}), **took}
