"""Hosts that are network namespaces of this machine, each with a name, an address and an sshd of its own.

host 1 (10.88.0.1) --+
                     +-- bridge, in a namespace of its own
host 2 (10.88.0.2) --+

What a host finds under /etc lies under /etc/netns/HOST, which `ip netns exec` mounts over it: names of the other hosts,
and the settings of ssh. So nothing of the machine's own network, names or ssh changes.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

SWITCH = "tsliceswitch"
PROGRAMS = ("ip", "unshare", "sshd", "ssh", "ssh-keygen", "pdsh")
SEARCH_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def missing() -> str:
    """Why there can be no hosts here; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [program for program in PROGRAMS if shutil.which(program, path=SEARCH_PATH) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    probe = subprocess.run(["ip", "netns", "add", SWITCH], capture_output=True, text=True, check=False)
    if probe.returncode:
        return f"no network namespace can be made here: {probe.stderr.strip()}"
    _run("ip", "netns", "delete", SWITCH)
    return ""


class Host:
    """One host."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.name, self.address = f"tslicehost{number}", f"10.88.0.{number}"
        self.etc = Path("/etc/netns", self.name)

    def command(self, words: Sequence[object]) -> list[str]:
        """The command, as it runs on this host."""
        script = 'hostname "$0" && exec "$@"'
        inside = ["unshare", "--uts", "sh", "-c", script, self.name, *map(str, words)]
        return ["ip", "netns", "exec", self.name, *inside]


@contextmanager
def hosts(count: int, folder: Path) -> Iterator[list[Host]]:
    """Hosts that reach each other by name, with ssh and no password.

    Args:
        count: how many.
        folder: for keys and logs.
    """
    made = [Host(number + 1) for number in range(count)]
    _remove(made)  # what a killed run left
    try:
        for name in ("user", "host"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name)
        Path("/run/sshd").mkdir(parents=True, exist_ok=True)  # where sshd locks its children in
        _run("ip", "netns", "add", SWITCH)
        _run("ip", "-n", SWITCH, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", SWITCH, "link", "set", "bridge", "up")
        for host in made:
            _write_etc(host, made, folder)
            _connect(host)
            _start_sshd(host, folder)
        yield made
    finally:
        for host in made:
            with suppress(OSError, ValueError):
                os.kill(int(_pid_file(host, folder).read_text()), 15)
        _remove(made)


def _connect(host: Host) -> None:
    _run("ip", "netns", "add", host.name)
    port = f"port{host.number}"
    _run("ip", "-n", SWITCH, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host.name)
    _run("ip", "-n", SWITCH, "link", "set", port, "master", "bridge", "up")
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
        "StrictModes no\nPasswordAuthentication no\nPermitRootLogin prohibit-password\n"
        f"PidFile {_pid_file(host, folder)}\n"
    )


def _start_sshd(host: Host, folder: Path) -> None:
    sshd = shutil.which("sshd", path=SEARCH_PATH)
    _run(*host.command([sshd, "-E", folder / f"sshd{host.number}.log"]))


def _pid_file(host: Host, folder: Path) -> Path:
    return folder / f"sshd{host.number}.pid"


def _remove(made: Sequence[Host]) -> None:
    for name in [*(host.name for host in made), SWITCH]:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    for host in made:
        shutil.rmtree(host.etc, ignore_errors=True)
        with suppress(OSError):  # while another's are in it
            host.etc.parent.rmdir()


def _run(*words: object) -> None:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, words))}: {done.stderr.strip() or done.stdout.strip()}")
