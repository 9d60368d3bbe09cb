"""The mark of tests that make machines of their own."""

import os
import shutil
from pathlib import Path

import pytest

PROGRAMS = {
    "/usr/sbin/sshd": "openssh-server",
    "ssh": "openssh-client",
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
}
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")

_lacking = sorted(
    {package for program, package in PROGRAMS.items() if shutil.which(program) is None}
)
_reason = f"needs {', '.join(_lacking)}" if _lacking else "needs to be root, to make namespaces"
needs_machines = pytest.mark.skipif(bool(_lacking) or os.geteuid() != 0, reason=_reason)
needs_faketime = pytest.mark.skipif(not FAKETIME.exists(), reason="needs libfaketime")
