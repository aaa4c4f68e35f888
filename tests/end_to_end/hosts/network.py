"""Hosts that are network namespaces of this machine, each with a name, an address and an sshd of its own.

host 1 (10.88.0.1) --+
                     +-- bridge, in a namespace of its own
host 2 (10.88.0.2) --+

The files of a host in /etc are in /etc/netns/HOST, which `ip netns exec` mounts over it: names of the other hosts,
and the settings of ssh. So nothing of the machine's own network, names or ssh changes. A host has processes of its own,
too: a program that is ended there by name, as DeepSpeed's launcher does, ends nothing elsewhere.

Names contain the process that made them, so that processes do not meet, and what a dead one left is found. Networks are
apart, so all of them have the same addresses.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from tests.end_to_end.hosts import link
from tests.end_to_end.launching import TIMEOUT_S, environment

PROGRAMS = ("ip", "unshare", "nsenter", "sshd", "ssh", "ssh-keygen", "pdsh")
SEARCH_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
NAMESPACES = Path("/run/netns")
ETC = Path("/etc/netns")
TOLD_TO_END = (signal.SIGTERM, signal.SIGHUP)
NAME = re.compile(r"tslice-(\d+)-\d+-\w+")
"""A namespace of ours: the process that made it, the number of its network, and the host or the switch."""


def missing() -> str:
    """Why there can be no hosts here; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [program for program in PROGRAMS if shutil.which(program, path=SEARCH_PATH) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    probe = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    return f"no network namespace can be made here: {probe.stderr.strip()}" if probe.returncode else ""


class Host:
    """One host.

    Args:
        core: the only core that it has; None = all of the machine's.
    """

    def __init__(self, network: str, number: int, core: int | None = None) -> None:
        self.number = number
        self.name, self.address = f"{network}-host{number}", f"10.88.0.{number}"
        self.port = f"port{number}"
        self.etc = ETC / self.name
        self._on_core = [] if core is None else ["taskset", "--cpu-list", str(core)]
        self._init: subprocess.Popen[str] | None = None

    def boot(self, folder: Path) -> None:
        """Start the host's first process, with which all others end, and its sshd."""
        sshd = [shutil.which("sshd", path=SEARCH_PATH), "-E", folder / f"sshd{self.number}.log"]
        # Children that others leave behind are reaped by whoever ignores their end.
        script = 'hostname "$0" && "$@" && echo up && trap "" CHLD && exec sleep infinity'
        new = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        words = ["ip", "netns", "exec", self.name, *self._on_core, *new, "sh", "-c", script, self.name, *map(str, sshd)]
        self._init = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self._init.stdout is not None
        if self._init.stdout.readline() != "up\n":
            raise RuntimeError(f"{self.name} did not start: see {sshd[-1]}")

    def command(self, words: Sequence[object]) -> list[str]:
        """Return the command as it runs on this host. A signal for it must be sent to one of `processes`."""
        assert self._init is not None
        here = ["nsenter", f"--pid=/proc/{self._init.pid}/ns/pid_for_children", "unshare", "--uts", "--mount-proc"]
        script = 'hostname "$0" && exec "$@"'
        inside = ["ip", "netns", "exec", self.name, *self._on_core, *here, "sh", "-c", script, self.name]
        return [*inside, *map(str, words)]

    def start(self, words: Sequence[object], folder: Path, **more: str) -> "subprocess.Popen[bytes]":
        """Start a command on this host, with more variables set; its output goes into `log.txt` of a folder."""
        with (folder / "log.txt").open("w") as log:
            return subprocess.Popen(
                self.command(words), cwd=folder, env=environment(**more), stdout=log, stderr=subprocess.STDOUT
            )

    def run(self, words: Sequence[object], folder: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
        """Run a command on this host to its end, with more variables set; its errors are in its output."""
        return subprocess.run(
            self.command(words),
            cwd=folder,
            env=environment(**more),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    def processes(self) -> dict[int, str]:
        """Return the command lines of all processes that were started on this host, by their numbers here."""
        found = {}
        for pid in _processes(self.name):
            with suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text()
                line = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
                # Not those that put others into the host, which stand outside, and not its first one.
                inside = re.search(r"^NSpid:\s+\d+\s+(?:\d+\s+)*(\d+)$", status, re.MULTILINE)
                if inside and inside[1] != "1" and line and not line.startswith("sshd: "):
                    found[pid] = line
        return found

    def shut_down(self) -> None:
        """End all processes of this host at once, as a loss of power does."""
        if self._init is not None:
            self._init.kill()
            self._init.wait()


class Network:
    """Hosts that reach each other.

    Args:
        cores: of the hosts, one each; empty = each has all.
    """

    def __init__(self, name: str, num_hosts: int, cores: Sequence[int] = ()) -> None:
        self.switch = f"{name}-switch"
        each = cores or [None] * num_hosts
        self.hosts = [Host(name, number + 1, each[number]) for number in range(num_hosts)]

    def hostfile(self, slots: int = 1) -> str:
        """Return the text of a hostfile with so many slots on each host."""
        return "".join(f"{host.name} slots={slots}\n" for host in self.hosts)

    def wait_for_all(self) -> None:
        """Wait until no process runs on any host."""
        deadline = time.monotonic() + TIMEOUT_S
        while any(host.processes() for host in self.hosts):
            assert time.monotonic() < deadline, [host.processes() for host in self.hosts]
            time.sleep(0.05)

    def limit_rate(self, rate_mbit: float) -> None:
        """Let every host send no faster than this."""
        for host in self.hosts:
            shape = f"tc qdisc replace dev eth0 root tbf rate {rate_mbit}mbit burst 64kb latency 50ms"
            _run(*host.command(shape.split()))

    def cut(self, host: Host) -> None:
        """Disconnect a host: packets from it and to it are lost, without an error."""
        _run("ip", "-n", self.switch, "link", "set", host.port, "nomaster")

    def lose_large_packets(self, host: Host) -> None:
        """Lose every packet of more than 600 bytes that a host sends or is sent: a queue has no room for it."""
        for namespace, device in ((host.name, "eth0"), (self.switch, host.port)):
            shape = "qdisc replace dev {} root tbf rate 100mbit burst 600 limit 60000"
            _run("tc", "-n", namespace, *shape.format(device).split())

    @contextmanager
    def link(self, *, delay_ms: float = 0.0, rate_mbit: float = 0.0, dropped: float = 0.0) -> Iterator[None]:
        """Connect two hosts by a link with a delay, a rate and a share of lost frames, in place of the bridge.

        Args:
            dropped: share of the frames that is lost.
        """
        ports = [host.port for host in self.hosts]
        for host in self.hosts:
            self.cut(host)
        program = [sys.executable, "-I", link.__file__, *ports, str(delay_ms), str(rate_mbit), str(dropped)]
        words = ["ip", "netns", "exec", self.switch, *program]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as forwarder:
            try:
                if forwarder.stdout is None or forwarder.stdout.readline() != "up\n":
                    raise RuntimeError("the link between the hosts did not start")
                yield
            finally:
                forwarder.kill()
        for host in self.hosts:
            self.restore(host)

    def restore(self, host: Host) -> None:
        """Connect a host again that was cut off, or that loses packets."""
        _run("ip", "-n", self.switch, "link", "set", host.port, "master", "bridge")
        for namespace, device in ((host.name, "eth0"), (self.switch, host.port)):
            # Nothing is there to delete if it was cut off.
            subprocess.run(
                ["tc", "-n", namespace, "qdisc", "delete", "dev", device, "root"], capture_output=True, check=False
            )


@contextmanager
def network(num_hosts: int, folder: Path, *, cores: Sequence[int] = ()) -> Iterator[Network]:
    """Hosts that reach each other by name, with ssh and no password; whatever ends the block, but SIGKILL, ends them.

    Args:
        cores: of the hosts, one each; empty = each has all.
    """
    with _ended_in_order():
        yield from _network(num_hosts, folder, cores)


def _network(num_hosts: int, folder: Path, cores: Sequence[int]) -> Iterator[Network]:
    _remove_those_of_dead_processes()
    made = Network(_new_name(), num_hosts, cores)
    try:
        for name in ("user", "host"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name)
        Path("/run/sshd").mkdir(parents=True, exist_ok=True)  # where sshd locks its children in
        _run("ip", "-n", made.switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", made.switch, "link", "set", "bridge", "up")
        for host in made.hosts:
            _write_etc(host, made.hosts, folder)
            _connect(host, made.switch)
            host.boot(folder)
        yield made
    finally:
        for host in made.hosts:
            host.shut_down()
        for name in (*(host.name for host in made.hosts), made.switch):
            _remove(name)


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Let the first signal that ends this process raise, as Ctrl-C does; later signals are ignored."""

    def raise_once(number: int, _: object) -> None:
        for each in TOLD_TO_END:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield  # Signals are the main thread's.
        return
    before = {each: signal.signal(each, raise_once) for each in TOLD_TO_END}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _new_name() -> str:
    """Return the name of a network whose switch was made; one of another process cannot have it."""
    for number in count(1):
        name = f"tslice-{os.getpid()}-{number}"
        if not (NAMESPACES / f"{name}-switch").exists():
            _run("ip", "netns", "add", f"{name}-switch")
            return name
    raise AssertionError


def _connect(host: Host, switch: str) -> None:
    _run("ip", "netns", "add", host.name)
    _run("ip", "-n", switch, "link", "add", host.port, "type", "veth", "peer", "name", "eth0", "netns", host.name)
    _run("ip", "-n", switch, "link", "set", host.port, "master", "bridge", "up")
    _run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
    for device in ("eth0", "lo"):
        _run("ip", "-n", host.name, "link", "set", device, "up")


def _write_etc(host: Host, everyone: Sequence[Host], folder: Path) -> None:
    (host.etc / "ssh").mkdir(parents=True)
    lines = ["127.0.0.1 localhost", *(f"{each.address} {each.name}" for each in everyone)]
    (host.etc / "hosts").write_text("\n".join(lines) + "\n")
    # A name that is not in that file is asked of nobody: waiting for an answer takes most of a minute.
    (host.etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nshadow: files\nhosts: files\n")
    (host.etc / "ssh" / "ssh_config").write_text(
        f"User root\nIdentityFile {folder / 'user'}\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\n"
        "LogLevel ERROR\n"
    )
    (host.etc / "ssh" / "sshd_config").write_text(
        f"ListenAddress {host.address}\nHostKey {folder / 'host'}\nAuthorizedKeysFile {folder / 'user.pub'}\n"
        f"StrictModes no\nPasswordAuthentication no\nPermitRootLogin prohibit-password\nPidFile none\n"
    )


def _remove_those_of_dead_processes() -> None:
    """Remove processes, namespaces and files of killed sessions."""
    names = {path.name for folder in (NAMESPACES, ETC) if folder.is_dir() for path in folder.iterdir()}
    for name in names:
        ours = NAME.fullmatch(name)
        if ours and not Path("/proc", ours[1]).exists():
            _remove(name)


def _remove(namespace: str) -> None:
    """End all processes of a namespace, and remove it."""
    for pid in _processes(namespace):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)
    shutil.rmtree(ETC / namespace, ignore_errors=True)
    with suppress(OSError):  # while another's are in it
        ETC.rmdir()


def _processes(namespace: str) -> list[int]:
    """Return the processes of a namespace; none if it is not there."""
    found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    return [int(word) for word in found.stdout.split()] if found.returncode == 0 else []


def _run(*words: object) -> None:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, words))}: {done.stderr.strip() or done.stdout.strip()}")
