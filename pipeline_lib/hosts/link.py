"""A link to one host's agent: start it by ssh or as a child process, ask it, and report its loss.

Messages to an agent have `do`: facts, listen, reach, start, stop, end, beat. Its answers have the
name of what they answer; while ranks run, it sends `line` for what they print and `ended` with the
launcher's exit code.
"""

import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from pipeline_lib.core.errors import ConfigError, Interrupted
from pipeline_lib.core.text import redact
from pipeline_lib.hosts.channel import Channel, ChannelClosed
from pipeline_lib.hosts.facts import PACKAGE, addresses

AGENT = ("-m", "pipeline_lib", "agent")
CONNECT_S = 10  # ssh's own limit for a host that does not answer
NO_FOLDER, NO_PYTHON = 121, 122  # exit codes of the remote shell
_SSH_FAILED = 255
_KEPT_LINES = 20
_END_S = 5.0
_LAST_WORDS_S = 1.0  # a child of the agent can hold its stderr open
# Each link has a connection of its own, without the user's forwardings; the rest is up to
# ~/.ssh/config.
_SSH = (
    "ssh",
    "-T",
    "-x",
    "-o",
    "BatchMode=yes",
    "-o",
    f"ConnectTimeout={CONNECT_S}",
    "-o",
    "ClearAllForwardings=yes",
)
_SSH_ALONE = ("-o", "ControlMaster=no", "-o", "ControlPath=none")
# What ssh says, and what to do about it.
_REMEDIES = (
    (
        "permission denied",
        "give it your key: `ssh-copy-id {host}`; `ssh -o BatchMode=yes {host} true` must succeed",
    ),
    (
        "identification has changed",
        "its key is another one than before: ask its owner, then `ssh-keygen -R {host}`",
    ),
    (
        "host key verification failed",
        "its key is not known here: run `ssh {host}` once and compare the fingerprint",
    ),
    (
        "could not resolve",
        "correct the name in the list of hosts, or add it to /etc/hosts or ~/.ssh/config",
    ),
    ("connection refused", "no sshd listens there: install openssh-server and start it"),
    ("timed out", "look at its power, its address and its firewall"),
    (
        "closed by remote host",
        "its sshd or the session of the agent was ended: look at the log of sshd on it",
    ),
    ("no route to host", "look at its power, its address and its firewall"),
)


class HostLost(Interrupted):
    """A host, its agent or the way to it was lost. `host` names it."""

    def __init__(self, host: str, reason: str) -> None:
        """Store the host and the reason, which become the message."""
        super().__init__(f"{host}: {reason}")
        self.host, self.reason = host, reason


@dataclass
class HostLink:
    """The connection to `host`'s agent; `process` is the ssh client or agent, if we started it."""

    host: str
    channel: Channel
    process: "subprocess.Popen[bytes] | None" = None
    errors: list[str] = field(default_factory=list)
    _reading_errors: threading.Thread | None = None

    def send(self, what: str, **fields: Any) -> None:
        """Tell the agent to do `what`."""
        self.channel.send({"do": what, **fields})

    def answer(self, name: str, deadline_s: float) -> Any:
        """Return the agent's answer `name`, waiting until the monotonic time `deadline_s`.

        Raises HostLost.
        """
        while True:
            try:
                message = self.channel.receive(deadline_s - time.monotonic())
            except ChannelClosed as error:
                raise HostLost(self.host, self.why_ended(str(error))) from error
            if message is None:
                raise HostLost(self.host, "its agent does not answer")
            if "error" in message:
                raise HostLost(self.host, str(message["error"]))
            if name in message:
                return message[name]

    def why_ended(self, reason: str) -> str:
        """Return why the connection has ended; `reason` is what the channel knows."""
        if self.process is None:
            return f"the connection of its agent has ended: {reason}"
        try:
            code = self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return f"the connection has ended: {reason}"
        if self._reading_errors is not None:
            self._reading_errors.join(_LAST_WORDS_S)
        said = redact(self.errors[-1]) if self.errors else ""
        if code == NO_FOLDER:
            return (
                f"there is no folder {Path.cwd()} on it: share this folder, or make it there "
                "with the same path"
            )
        if code == NO_PYTHON:
            return (
                f"there is no {sys.executable} on it: install the same environment at the same path"
            )
        if code == _SSH_FAILED and said:
            text = " ".join(self.errors).lower()
            remedy = next(
                (what for sign, what in _REMEDIES if sign in text), "try `ssh -v {host} true`"
            )
            return f"ssh: {said.removeprefix('ssh: ').rstrip('.')}; {remedy.format(host=self.host)}"
        if code == _SSH_FAILED:
            return "its agent was killed (out of memory?)"
        ended = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return f"its agent {ended}{f': {said}' if said else ''}"

    def close(self) -> None:
        """End the agent: at the end of its input it ends its ranks."""
        self.channel.close()
        if self.process is not None:
            try:
                self.process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def connect(host: str, setup: Sequence[str]) -> HostLink:
    """Start `host`'s agent: as a child process if on this machine, else by ssh after `setup`.

    `setup` are lines to run. Returns at once; a host that cannot be reached shows in the first
    answer. Neither gets the terminal's Ctrl-C. Raises ConfigError without ssh.
    """
    if is_this_machine(host):
        command = [sys.executable, *AGENT]
    else:
        command = [*_SSH, *_SSH_ALONE, "--", host, _remote(setup)]
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
    except OSError as error:
        problem = (
            f"{host}: {command[0]} cannot be run ({error.strerror}); install openssh-client "
            "on this machine"
        )
        raise ConfigError("the hosts", [problem]) from error
    reader = process.stdout
    writer = process.stdin
    if reader is None or writer is None:
        raise HostLost(host, "its agent has no pipes")
    errors: list[str] = []
    reading = threading.Thread(target=_keep_errors, args=(process.stderr, errors), daemon=True)
    reading.start()
    return HostLink(host, Channel(reader, writer, noise=errors.append), process, errors, reading)


def _remote(setup: Sequence[str]) -> str:
    """Return the command for the login shell of a host, of whatever kind that shell is."""
    folder = shlex.quote(str(Path.cwd()))
    python = shlex.quote(sys.executable)
    code = shlex.quote(str(PACKAGE.parent))
    lines = [f"cd {folder} || exit {NO_FOLDER}", f"test -x {python} || exit {NO_PYTHON}", *setup]
    lines.append(f'PYTHONPATH={code}:"$PYTHONPATH" exec {python} {" ".join(AGENT)}')
    return f"exec {'bash' if setup else 'sh'} -c {shlex.quote(chr(10).join(lines))}"


def is_this_machine(host: str) -> bool:
    """Return whether `host` is a name or an address of this machine.

    Only a name of ours is looked up: no DNS.
    """
    own = {
        "localhost",
        "127.0.0.1",
        "::1",
        socket.gethostname(),
        socket.gethostname().partition(".")[0],
    }
    return host in own or any(host in found for found in addresses().values())


def _keep_errors(stream: IO[bytes] | None, errors: list[str]) -> None:
    if stream is None:
        return
    with suppress(ValueError, OSError):
        for line in stream:
            if text := line.decode(errors="replace").strip():
                errors.append(text)
                del errors[:-_KEPT_LINES]
