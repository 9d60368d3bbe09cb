"""Machines on one kernel: each has a network, processes, mounts, a name and an sshd of its own.

m1 and the others are ends of cables to a bridge. Each is a set of namespaces that its first process
holds, so that killing this process is like taking the power: all others end at once.
"""

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil

from tests.hosts.needs import FAKETIME

DEADLINE_S = 60.0
SSHD = "/usr/sbin/sshd"
# no packet is as small as this bucket
LOSE_ALL = ("root", "tbf", "rate", "8bit", "burst", "10", "limit", "1")
# The first process of a machine: it adopts and reaps what others leave behind.
INIT = "while true; do sleep 3600 & wait $!; done"


class MachineError(Exception):
    """A machine could not be made, or did not do what it should."""


class Machine:
    """One machine. `address` is that of its eth0, and `home` is what it sees at /root."""

    def __init__(self, name: str, address: str, folder: Path, cable: str) -> None:
        """Describe a machine that is not on yet. `cable` is this side's end of its link."""
        self.name, self.address, self.folder, self.cable = name, address, folder, cable
        self.home = folder / "home"
        self.bridge = ""
        self._init: psutil.Process | None = None
        self._known_namespace = ""

    @property
    def init(self) -> psutil.Process:
        """The process that holds the namespaces."""
        if self._init is None:
            raise MachineError(f"{self.name} is off")
        return self._init

    @property
    def is_on(self) -> bool:
        """Whether it has power."""
        return self._init is not None and self._init.is_running()

    def power_on(self, bridge: str) -> None:
        """Make its namespaces and its link, and start its sshd."""
        self.bridge = bridge
        namespaces = [
            *("setpriv", "--pdeathsig", "KILL"),  # a test that is killed leaves no machine
            "unshare",
            "--net",
            "--pid",
            "--uts",
            "--mount",
            "--ipc",
            "--fork",
            "--mount-proc",
            "--kill-child",
        ]
        outer = subprocess.Popen(
            [*namespaces, "bash", "-c", INIT],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        self._outer = outer
        parent = psutil.Process(outer.pid)
        self._known_namespace = ""
        wait_until(lambda: bool(parent.children()), f"{self.name} has a first process")
        self._init = parent.children()[0]
        wait_until(
            lambda: self._init is not None and self._init.name() == "bash", f"{self.name} is set up"
        )
        # the same after each start
        card = "02:00:" + ":".join(f"{int(part):02x}" for part in self.address.split("."))
        cable = [
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "address",
            card,
            "netns",
            str(self._init.pid),
        ]
        _call("ip", "link", "add", self.cable, *cable)
        _call("ip", "link", "set", self.cable, "master", bridge, "up")
        steps = [
            f"hostname {self.name}",
            "mount --make-rprivate /",
            "mount -t tmpfs none /run && mkdir -p /run/sshd",
            f"mount --bind {self.folder / 'hosts'} /etc/hosts",
            f"mkdir -p {self.home}/.pyenv",
            f"if [ -d /root/.pyenv ]; then mount --bind /root/.pyenv {self.home}/.pyenv; fi",
            f"mount --rbind {self.home} /root",
            "ip link set lo up && ip link set eth0 up",
            f"ip address add {self.address}/24 dev eth0",
            f"{SSHD} -f {self.folder / 'sshd_config'} -E {self.folder / 'sshd.log'}",
        ]
        self.run("sh", "-ec", "\n".join(steps), cwd=Path("/"))
        wait_until(lambda: self._listens(), f"the sshd of {self.name} listens")

    def _listens(self) -> bool:
        return ":22 " in self.run("ss", "-Hltn", cwd=Path("/")).stdout

    def power_off(self) -> None:
        """Take its power: its link dies before anything is said, and all processes end at once."""
        self.cut()
        self.init.kill()
        self._outer.wait(DEADLINE_S)
        wait_until(lambda: not self.processes(), f"{self.name} is off")
        _call("ip", "link", "del", self.cable, check=False)

    def command(
        self, *command: str, cwd: Path, environ: Mapping[str, str] | None = None
    ) -> list[str]:
        """The command line for `command` on this machine, with its environment and `environ`."""
        given = {"HOME": "/root", "USER": "root", **(environ or {})}
        settings = [f"{name}={value}" for name, value in given.items()]
        inside = [
            "sh",
            "-c",
            f'cd {shlex.quote(str(cwd))} && exec "$@"',
            "sh",
            "env",
            *settings,
            *command,
        ]
        return ["nsenter", "--target", str(self.init.pid), "--all", "--", *inside]

    def run(
        self,
        *command: str,
        cwd: Path,
        environ: Mapping[str, str] | None = None,
        check: bool = True,
        timeout_s: float = DEADLINE_S,
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command there to its end; what it prints is in stdout."""
        done = subprocess.run(
            self.command(*command, cwd=cwd, environ=environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
        if check and done.returncode:
            raise MachineError(
                f"{self.name}: {' '.join(command)} ended with {done.returncode}: {done.stdout}"
            )
        return done

    def start(
        self, *command: str, cwd: Path, log: Path, environ: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        """Start a command there in a session of its own; what it prints goes to `log`."""
        with log.open("wb") as file:
            return subprocess.Popen(
                self.command(*command, cwd=cwd, environ=environ),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def processes(self, word: str = "") -> list[psutil.Process]:
        """Its processes, without the first one, that have `word` in their command lines."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            with contextlib.suppress(OSError, psutil.Error):
                namespace = os.readlink(f"/proc/{process.pid}/ns/pid")  # noqa: PTH115
                is_here = namespace == self._namespace and process.pid != self.init.pid
                if is_here and word in " ".join(process.info["cmdline"] or []):
                    found.append(process)
        return found

    @property
    def _namespace(self) -> str:
        if not self._known_namespace:
            self._known_namespace = os.readlink(f"/proc/{self.init.pid}/ns/pid")  # noqa: PTH115
        return self._known_namespace

    def cut(self) -> None:
        """Cut its cable: nothing arrives in either direction."""
        _call("ip", "link", "set", self.cable, "down")

    def cut_outgoing(self) -> None:
        """Lose all that it sends."""
        inside = ["nsenter", "--target", str(self.init.pid), "--net"]
        _call(*inside, "tc", "qdisc", "replace", "dev", "eth0", *LOSE_ALL)

    def cut_incoming(self) -> None:
        """Lose all that is sent to it."""
        _call("tc", "qdisc", "replace", "dev", self.cable, *LOSE_ALL)

    def limit(self, mbit_s: int) -> None:
        """Throttle its link in both directions."""
        burst = str(max(64_000, mbit_s * 1_000_000 // 8 // 100))
        shape = ["root", "tbf", "rate", f"{mbit_s}mbit", "burst", burst, "latency", "100ms"]
        _call("tc", "qdisc", "replace", "dev", self.cable, *shape)
        inside = ["nsenter", "--target", str(self.init.pid), "--net"]
        _call(*inside, "tc", "qdisc", "replace", "dev", "eth0", *shape)

    def mend(self) -> None:
        """Undo what was done to its link."""
        _call("ip", "link", "set", self.cable, "up")
        _call("tc", "qdisc", "del", "dev", self.cable, "root", check=False)
        inside = ["nsenter", "--target", str(self.init.pid), "--net"]
        _call(*inside, "tc", "qdisc", "del", "dev", "eth0", "root", check=False)

    def mount_private(self, folder: Path, size_mb: int) -> None:
        """Mount an empty disk over `folder`, here only; what runs already sees it as well."""
        folder.mkdir(parents=True, exist_ok=True)
        self.run(
            "mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "none", str(folder), cwd=Path("/")
        )

    def shift_clock(self, seconds: int) -> None:
        """Let whatever its sshd starts from now on see a clock that is ahead by `seconds`."""
        config = self.folder / "sshd_config"
        variables = f"LD_PRELOAD={FAKETIME} FAKETIME={seconds:+d}s FAKETIME_DONT_FAKE_MONOTONIC=1"
        config.write_text(f"{config.read_text()}SetEnv {variables}\n")
        for process in self.processes("sshd"):
            if "[listener]" in " ".join(process.cmdline()):
                process.send_signal(1)
        wait_until(lambda: self._listens(), "sshd listens again")


@contextlib.contextmanager
def machines(folder: Path, count: int = 2) -> Iterator[list[Machine]]:
    """Machines m1, m2, ... that reach each other by ssh, in `folder`."""
    tag = f"{os.getpid() % 0xFFFF:x}{next(_NUMBERS)}"
    bridge, subnet = f"qh{tag}b", _free_subnet()
    names = [f"m{number}" for number in range(1, count + 1)]
    made = [
        Machine(name, f"{subnet}.{number + 10}", folder / name, f"qh{tag}{name}")
        for number, name in enumerate(names)
    ]
    _prepare(made)
    try:
        _call("ip", "link", "add", bridge, "type", "bridge", "forward_delay", "0")
        _call("ip", "link", "set", bridge, "up")
        for machine in made:
            machine.power_on(bridge)
        yield made
    finally:
        for machine in made:
            with contextlib.suppress(MachineError, psutil.Error, subprocess.SubprocessError):
                machine.power_off()
        _call("ip", "link", "del", bridge, check=False)


_NUMBERS = iter(range(1_000))


def _prepare(made: list[Machine]) -> None:
    """Write the machines' keys and settings; any reaches any other, and nowhere else can."""
    names = "".join(f"{machine.address} {machine.name}\n" for machine in made)
    for machine in made:
        (machine.home / ".ssh").mkdir(parents=True, mode=0o700)
        (machine.folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        key = machine.folder / "host_key"
        _call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
        (machine.folder / "sshd_config").write_text(
            f"HostKey {key}\nAuthorizedKeysFile /root/.ssh/authorized_keys\nPermitRootLogin yes\n"
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\nUsePAM no\nStrictModes "
            "no\n"
            f"PidFile {machine.folder}/sshd.pid\nLogLevel ERROR\n"
        )
    client = made[0].folder / "client_key"
    _call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(client))
    known = "".join(
        f"{machine.name},{machine.address} "
        f"{' '.join((machine.folder / 'host_key.pub').read_text().split()[:2])}\n"
        for machine in made
    )
    for machine in made:
        ssh = machine.home / ".ssh"
        shutil.copy(client, ssh / "id_ed25519")
        (ssh / "id_ed25519").chmod(0o600)
        shutil.copy(client.with_suffix(".pub"), ssh / "authorized_keys")
        (ssh / "known_hosts").write_text(known)


def _free_subnet() -> str:
    """The first three bytes of addresses that no route here leads to; another by process."""
    routes = json.loads(_call("ip", "-json", "route", "show", "table", "all"))
    taken = " ".join(str(route.get("dst", "")) for route in routes)
    for number in range(os.getpid(), os.getpid() + 20_000):
        prefix = f"10.{100 + number // 250 % 80}.{number % 250}"
        if f"{prefix}." not in taken:
            return prefix
    raise MachineError("no free addresses below 10.100 to 10.179")


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = DEADLINE_S) -> None:
    """Wait until `condition` holds. Raises MachineError after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise MachineError(f"it is not so after {timeout_s:.0f} s that {what}")
        time.sleep(0.1)  # `condition` may look at all processes of the machine


def _call(*command: str, check: bool = True) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL
    )
    if check and done.returncode:
        raise MachineError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
