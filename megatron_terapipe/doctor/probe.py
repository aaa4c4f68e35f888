"""The probe: one self-contained program that is sent to each host, and prints a line of JSON for each question.

Questions come on standard input, answers go to standard output. The program imports the standard library only, because
its source runs on hosts on which nothing else may be installed. It ends when its input is closed, also in the middle of
a question, and removes every process, file and port of its own: a user may interrupt the doctor, and the ssh connection
may break. The keys of its answers are the fields of `facts.py`.
"""

import csv
import fcntl
import hashlib
import json
import os
import platform
import queue
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any

# Resources and interfaces.

ASK_ADDRESS = 0x8915
"""SIOCGIFADDR of Linux."""

IS_UP = 0x1
"""IFF_UP of Linux."""

CONTAINER = Path("/sys/fs/cgroup")


def resources() -> dict[str, Any]:
    """Return cores, memory and limits of a process here."""
    total, free = _memory()
    try:
        shared = os.statvfs("/dev/shm")  # noqa: S108 - only its size is read
    except OSError:
        shared = None
    return {
        "cores": _cores(),
        "memory_bytes": total,
        "free_memory_bytes": free,
        "shared_memory_bytes": None if shared is None else shared.f_frsize * shared.f_blocks,
        "free_shared_memory_bytes": 0 if shared is None else shared.f_frsize * shared.f_bavail,
        "locked_memory_bytes": _limit(resource.RLIMIT_MEMLOCK),
        "open_files": _limit(resource.RLIMIT_NOFILE),
        "processes": _limit(resource.RLIMIT_NPROC),
        "has_infiniband": any(Path("/sys/class/infiniband").glob("*")),
    }


def _cores() -> int:
    cores = len(os.sched_getaffinity(0))
    quota, _, period = _read(CONTAINER / "cpu.max").partition(" ")
    # A container may use only a part of the cores that its kernel lists.
    return max(1, min(cores, int(quota) // int(period))) if quota.isdecimal() and period.isdecimal() else cores


def _memory() -> tuple[int, int]:
    """Return the total and the free bytes of the host or of its container."""
    lines = (line.split() for line in _read("/proc/meminfo").splitlines())
    kib = {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1}
    total, free = 1024 * kib.get("MemTotal", 0), 1024 * kib.get("MemAvailable", 0)
    limit, used = _read(CONTAINER / "memory.max"), _read(CONTAINER / "memory.current")
    if limit.isdecimal() and used.isdecimal() and int(limit) < total:
        return int(limit), min(free, max(0, int(limit) - int(used)))
    return total, free


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def interfaces() -> list[dict[str, Any]]:
    """Return the network interfaces of this host."""
    lines = [line.split() for line in _read("/proc/net/if_inet6").splitlines()]
    return [
        {
            "name": name,
            "addresses": [*_ipv4(name), *(str(IPv6Address(int(words[0], 16))) for words in lines if words[-1] == name)],
            "is_up": bool(int(_read(f"/sys/class/net/{name}/flags") or "0", 16) & IS_UP),
        }
        for _, name in socket.if_nameindex()
    ]


def _ipv4(name: str) -> list[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, ASK_ADDRESS, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return []
    return [socket.inet_ntoa(answer[20:24])]


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


# Devices and software.

MIB = 2**20
DEVICE_FIELDS = "uuid,name,memory.total,memory.free,driver_version"


def devices() -> list[dict[str, Any]]:
    """Return the accelerators that NVIDIA's driver lists; none where its tool is not installed."""
    processes: dict[str, list[str]] = {}
    for uuid, name, number in _nvidia_smi("--query-compute-apps=gpu_uuid,process_name,pid"):
        processes.setdefault(uuid, []).append(f"{os.path.basename(name)} ({number})")
    return [
        {
            "name": name,
            "memory_bytes": int(total) * MIB,
            "free_bytes": int(free) * MIB,
            "processes": processes.get(uuid, []),
            "driver": driver,
        }
        for uuid, name, total, free, driver in _nvidia_smi(f"--query-gpu={DEVICE_FIELDS}")
        if total.isdecimal() and free.isdecimal()
    ]


def _nvidia_smi(query: str) -> list[list[str]]:
    done = _output(["nvidia-smi", query, "--format=csv,noheader,nounits"], 20)
    length = query.count(",") + 1
    rows = csv.reader(done.splitlines(), skipinitialspace=True)
    return [row for row in rows if len(row) == length]


def _output(words: list[str], limit_s: float) -> str:
    """Return the output of a command; empty if it cannot be run, or fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=limit_s, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


PROGRAMS = ("ssh", "pdsh", "mpirun", "mpiexec", "srun")
SOURCES = ("deepspeed_ext", "megatron_terapipe")


def software(python: str, packages: list[str], project: str, directory: str) -> dict[str, Any]:
    """Return the installed software."""
    return {
        "python": python if os.access(python, os.X_OK) else None,
        "python_version": platform.python_version(),
        "packages": {name: found for name in packages if (found := _version(name)) is not None},
        "digest": digest_of(Path(project)),
        "programs": programs(),
        "has_folder": os.path.isdir(directory),
    }


def programs() -> dict[str, str]:
    """Return the paths of the launchers that are on the PATH here."""
    return {name: path for name in PROGRAMS if (path := shutil.which(name)) is not None}


def digest_of(project: Path) -> str | None:
    """Return twelve letters that change with any source file of this project; None if it is not in this folder."""
    files = sorted(path for folder in SOURCES for path in (project / folder).rglob("*.py"))
    if not files:
        return None
    digest = hashlib.sha256()
    for path in files:
        digest.update(str(path.relative_to(project)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# Names and variables.

READ_BY_RANKS = (
    *("NCCL_", "GLOO_", "CUDA_", "CUBLAS_", "TORCH_", "PYTORCH_", "OMP_", "MKL_", "KMP_", "UCX_", "FI_", "TP_"),
    *("DS_ACCELERATOR", "MASTER_ADDR", "MASTER_PORT", "LD_PRELOAD", "PYTHONPATH"),
)
"""Prefixes of variables that change a run. No others are read, because they may contain passwords."""


def names() -> dict[str, Any]:
    """Return the name of this host, and its addresses."""
    hostname = socket.gethostname()
    try:
        found = socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        found = []
    return {
        "hostname": hostname,
        "own_addresses": list(dict.fromkeys(str(address[0]) for *_, address in found)),
        "listed_addresses": _output(["hostname", "-I"], 10).split(),
    }


def variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that change a run."""
    return {name: value for name, value in sorted(environment.items()) if name.startswith(READ_BY_RANKS)}


# The directory for checkpoints.

PREFIX = ".terapipe-doctor-"
DISK_S = 15.0
"""Seconds in which a disk must answer: a process that waits for a dead file server may wait forever."""


class Undo:
    """Files and processes of this probe, which are removed when it ends."""

    def __init__(self) -> None:
        # Held while one is made and noted. `end` takes them and keeps them, so that none is made later.
        self.file_lock, self.process_lock = threading.Lock(), threading.Lock()
        self.files: list[Path] = []
        self.processes: list[subprocess.Popen[str]] = []

    def end(self) -> None:
        """Remove everything."""
        self.process_lock.acquire(timeout=LONGEST_BEGIN_S)
        for process in self.processes:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
        self.file_lock.acquire(timeout=LONGEST_BEGIN_S)
        for path in self.files:
            with suppress(OSError):
                path.unlink(missing_ok=True)


def folder(undo: Undo, path: str, token: str, limit_s: float = DISK_S) -> dict[str, Any]:
    """Write a file into a directory, or into the nearest one above it that exists, because a run makes the others.

    Args:
        token: text of the file, and part of its name.
    """
    found: list[dict[str, Any]] = []
    writer = threading.Thread(target=lambda: found.append(_write(undo, path, token)), daemon=True)
    writer.start()
    writer.join(limit_s)
    fault = f"the disk does not answer in {limit_s:.0f} s"
    return found[0] if found else {"path": path, "fault": fault, "free_bytes": 0}


def _write(undo: Undo, path: str, token: str) -> dict[str, Any]:
    existing = Path(path)
    while not existing.is_dir() and existing != existing.parent:
        if existing.exists():
            return {"path": str(existing), "fault": f"{existing} is a file", "free_bytes": 0}
        existing = existing.parent
    fault, file = None, existing / f"{PREFIX}{token}"
    try:
        with undo.file_lock:
            undo.files.append(file)
            opened = file.open("x")
        with opened:
            opened.write(token)
            opened.flush()
            os.fsync(opened.fileno())
    except OSError as error:
        fault = error.strerror or str(error)
    room = os.statvfs(existing)
    return {"path": str(existing), "fault": fault, "free_bytes": room.f_frsize * room.f_bavail}


# Links to other hosts.

TOKEN_BYTES = 16
LIMIT_S = 3.0
"""Longest time of a connection attempt, and longest silence on a connection."""

ROUND_TRIPS = 20


class Listener:
    """A port on which threads send a token and echo bytes until this process ends.

    Args:
        port: to listen on; 0 = any that is free.

    Raises:
        OSError: if the port is in use.
    """

    def __init__(self, port: int, token: str) -> None:
        self._token = bytes.fromhex(token)
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._server = socket.create_server(("", port), family=family, backlog=128, dualstack_ipv6=both)
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                threading.Thread(target=self._echo, args=[connection], daemon=True).start()

    def _echo(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.settimeout(2 * LIMIT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(self._token)
            while byte := connection.recv(1):
                connection.sendall(byte)


def reach(address: str, port: int, token: str) -> float:
    """Return the seconds of the fastest of some round trips to the host that has a token.

    Raises:
        OSError: if there is no connection, or another program answers.
    """
    with socket.create_connection((address, port), timeout=LIMIT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        received = b""
        while len(received) < TOKEN_BYTES and (more := connection.recv(TOKEN_BYTES - len(received))):
            received += more
        if received != bytes.fromhex(token):
            raise OSError("another program answers there")
        fastest = float("inf")
        for _ in range(ROUND_TRIPS):
            began = time.perf_counter()
            connection.sendall(b".")
            if not connection.recv(1):
                raise ConnectionResetError("the connection was closed")
            fastest = min(fastest, time.perf_counter() - began)
        return fastest


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    return (os.strerror(error.errno) if error.errno else str(error)).lower()


# The questions.

MARK = "doctor: "
"""First letters of an answer; shells that print greetings write other lines."""

IMPORTED = "imported: "
IMPORTS = f"""
import json
import torch
from deepspeed.accelerator import get_accelerator
has_cuda = torch.cuda.is_available()
print({IMPORTED!r} + json.dumps({{
    "accelerator": get_accelerator().device_name(),
    "num_devices": torch.cuda.device_count() if has_cuda else 0,
    "cuda": torch.version.cuda,
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_cuda else None,
}}), flush=True)
"""

END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM)

LONGEST_BEGIN_S = 1.0
"""Longest time in which a process is started or a file made."""

LIFETIME_S = 900
"""Seconds after which a probe ends by itself: a broken connection may never be closed."""


def all_facts(
    undo: Undo,
    python: str,
    packages: list[str],
    project: str,
    directory: str,
    checkpoints: str,
    token: str,
    ports: list[int],
) -> dict[str, Any]:
    """Return the facts of this host, and listen on some ports.

    Args:
        ports: to listen on; 0 = any that is free.
    """
    listening: list[dict[str, Any]] = []
    for port in ports:
        try:
            listening.append({"port": Listener(port, token).port})
        except OSError as error:
            listening.append({"fault": _reason(error)})
    facts = {
        "software": software(python, packages, project, directory),
        "devices": devices(),
        "resources": resources(),
        "interfaces": interfaces(),
        "names": names(),
        "variables": variables(),
        "folder": folder(undo, checkpoints, token),
    }
    return {"facts": facts, "listening": listening}


def links(undo: Undo, targets: list[dict[str, Any]], file: str, token: str) -> dict[str, Any]:
    """Return the round trips to some hosts, and whether the file of another host is visible here.

    Args:
        targets: the arguments of `reach`, for each host.
        file: its path.
        token: text of it.
    """
    found: list[dict[str, Any]] = []
    for target in targets:
        try:
            found.append({"round_trip_s": reach(**target)})
        except OSError as error:
            found.append({"fault": _reason(error)})
    try:
        os.listdir(os.path.dirname(file))  # A network file system then reads the directory again.
        return {"links": found, "sees_token": Path(file).read_text() == token}
    except OSError:
        return {"links": found, "sees_token": False}


def imports(undo: Undo, variables: dict[str, str], directory: str, seconds: float) -> dict[str, Any]:
    """Import torch and DeepSpeed as a rank does, and return their versions and devices.

    Args:
        seconds: after which the import is ended.
    """
    with undo.process_lock:
        process = subprocess.Popen(
            [sys.executable, "-c", IMPORTS],
            cwd=directory if os.path.isdir(directory) else None,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        undo.processes.append(process)
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"error": f"no answer within {seconds:.0f} s"}
    for line in output.splitlines():
        if line.startswith(IMPORTED):
            return dict(json.loads(line.removeprefix(IMPORTED)))
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return {"error": lines[-1][:300] if lines else f"exit code {process.returncode}"}


QUESTIONS: dict[str, Callable[..., dict[str, Any]]] = {"facts": all_facts, "links": links, "imports": imports}


def serve() -> None:
    """Answer questions until the input is closed."""
    undo = Undo()
    questions: queue.SimpleQueue[str] = queue.SimpleQueue()

    def leave() -> None:
        undo.end()
        os._exit(0)

    def wait_for_signals() -> None:
        signal.sigwait(END_SIGNALS)
        leave()

    def read() -> None:
        for line in sys.stdin:
            questions.put(line)
        leave()

    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    # A thread of its own waits for them, because this one may be just making a file or a process.
    signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
    threading.Thread(target=wait_for_signals, daemon=True).start()
    signal.alarm(LIFETIME_S)
    threading.Thread(target=read, daemon=True).start()
    while True:
        question = json.loads(questions.get())
        try:
            answer: dict[str, Any] = {"answer": QUESTIONS[question["ask"]](undo, **question["with"])}
        except OSError as error:
            answer = {"fault": _reason(error)}
        try:
            print(MARK + json.dumps({**answer, "time": time.time()}), flush=True)
        except OSError:
            leave()
