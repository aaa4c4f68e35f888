"""The probe: one program, sent over ssh, that answers questions about its host, a line of JSON each.

Questions come on standard input, answers go to standard output. It imports the standard library only, because its
source runs on hosts where nothing else may be installed. It ends when its input is closed, whatever it does at that
time, and leaves no process, file or port behind: the doctor may be interrupted, and the ssh connection may be cut.
The keys of its answers are the fields of `facts.py`.
"""

import csv
import fcntl
import hashlib
import json
import os
import platform
import queue
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
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
        shared = os.statvfs("/dev/shm")  # noqa: S108 - asked for its size
    except OSError:
        shared = None
    ports = _read("/proc/sys/net/ipv4/ip_local_port_range").split()
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
        "outgoing_ports": [int(port) for port in ports] if len(ports) == 2 else None,
    }


def _cores() -> int:
    cores = len(os.sched_getaffinity(0))
    quota, _, period = _read(CONTAINER / "cpu.max").partition(" ")
    # A container may have a share of the cores that it sees.
    return max(1, min(cores, int(quota) // int(period))) if quota.isdecimal() and period.isdecimal() else cores


def _memory() -> tuple[int, int]:
    """All bytes, and those that are free, of the host or of its container."""
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
    found = []
    lines = [line.split() for line in _read("/proc/net/if_inet6").splitlines()]
    for _, name in socket.if_nameindex():
        speed = _read(f"/sys/class/net/{name}/speed")
        ipv6 = [str(IPv6Address(int(words[0], 16))) for words in lines if words[-1] == name]
        found.append(
            {
                "name": name,
                "addresses": [*_ipv4(name), *ipv6],
                "is_up": bool(int(_read(f"/sys/class/net/{name}/flags") or "0", 16) & IS_UP),
                "speed_mbit": int(speed) if speed.isdecimal() and int(speed) > 0 else None,
                "largest_packet": int(_read(f"/sys/class/net/{name}/mtu") or 0),
            }
        )
    return found


def _ipv4(name: str) -> list[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            answer = fcntl.ioctl(asked, ASK_ADDRESS, struct.pack("256s", name.encode()[:15]))
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
    compiler = shutil.which("nvcc") or os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc")
    toolkit = re.search(r"release (\d+\.\d+)", _output([compiler, "--version"], 10))
    return {
        "python": python if os.access(python, os.X_OK) else None,
        "python_version": platform.python_version(),
        "packages": {name: found for name in packages if (found := _version(name)) is not None},
        "apex": _apex(),
        "toolkit": toolkit[1] if toolkit else None,
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


def _apex() -> str | None:
    """Return the origin of apex: NVIDIA's has fused optimizers, PyPI's package of that name has none."""
    try:
        found = find_spec("apex")
    except (ImportError, ValueError):
        return None
    if found is None:
        return None
    folders = list(found.submodule_search_locations or ())
    return "nvidia" if any(Path(each, "optimizers", "fused_adam.py").exists() for each in folders) else "other"


# Names and variables.

READ_BY_RANKS = (
    *("NCCL_", "GLOO_", "CUDA_", "CUBLAS_", "TORCH_", "PYTORCH_", "OMP_", "MKL_", "KMP_", "UCX_", "FI_", "TP_"),
    *("DS_ACCELERATOR", "MASTER_ADDR", "MASTER_PORT", "LD_PRELOAD", "PYTHONPATH"),
)
"""Beginnings of variables that change a run. No others are read: they may hold passwords."""


def names(others: list[str]) -> dict[str, Any]:
    """Return names and addresses as this host resolves them."""
    hostname = socket.gethostname()
    with ThreadPoolExecutor(16) as pool:
        own, *found = pool.map(_addresses, [hostname, *others])
    return {
        "hostname": hostname,
        "own_addresses": own,
        "listed_addresses": _output(["hostname", "-I"], 10).split(),
        "others": dict(zip(others, found, strict=True)),
    }


def _addresses(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that change a run."""
    return {name: value for name, value in sorted(environment.items()) if name.startswith(READ_BY_RANKS)}


# The folder for checkpoints.

PREFIX = ".terapipe-doctor-"
DISK_S = 15.0
"""Seconds in which a disk must answer: a file server that is gone lets its users wait for ever."""


def folder(path: str, limit_s: float = DISK_S) -> dict[str, Any]:
    """Return the state of a directory, or of the nearest one above it that exists: a run makes the others."""
    found: list[dict[str, Any]] = []
    looking = threading.Thread(target=lambda: found.append(_tried(path)), daemon=True)
    looking.start()
    looking.join(limit_s)
    fault = f"the disk does not answer in {limit_s:.0f} s"
    return found[0] if found else {"path": path, "fault": fault, "free_bytes": 0}


def _tried(path: str) -> dict[str, Any]:
    existing = Path(path)
    while not existing.is_dir() and existing != existing.parent:
        if existing.exists():
            return {"path": str(existing), "fault": f"{existing} is a file", "free_bytes": 0}
        existing = existing.parent
    fault = None
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=PREFIX) as file:
            file.write(b"terapipe doctor\n" * 256)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        fault = error.strerror or str(error)
    room = os.statvfs(existing)
    return {"path": str(existing), "fault": fault, "free_bytes": room.f_frsize * room.f_bavail}


# Links to other hosts.

TOKEN_BYTES = 16
LIMIT_S = 3.0
"""Seconds for a connection, and without any byte on one."""

ROUND_TRIPS = 20
BUFFER_BYTES = 2**20
ECHO, SINK = b"e", b"s"


class Listener:
    """A port on which threads answer until this process ends.

    Args:
        port: to listen on; 0 = any that is free.

    Raises:
        OSError: if the port is taken.
    """

    def __init__(self, port: int, token: str) -> None:
        self._token = bytes.fromhex(token)
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._server = socket.create_server(("", port), family=family, backlog=128, dualstack_ipv6=both)
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Listen no more."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                threading.Thread(target=self._answer, args=[connection], daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.settimeout(2 * LIMIT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(self._token)
            wanted = connection.recv(1)
            if wanted == ECHO:
                while byte := connection.recv(1):
                    connection.sendall(byte)
            elif wanted == SINK:
                buffer, received = bytearray(BUFFER_BYTES), 0
                while count := connection.recv_into(buffer):
                    received += count
                connection.sendall(received.to_bytes(8, "big"))


def connect(address: str, port: int, token: str) -> socket.socket:
    """Return a connection to the host that has a token.

    Raises:
        OSError: if there is none, or another program answers.
    """
    connection = socket.create_connection((address, port), timeout=LIMIT_S)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        shown = b""
        while len(shown) < TOKEN_BYTES and (more := connection.recv(TOKEN_BYTES - len(shown))):
            shown += more
        if shown != bytes.fromhex(token):
            raise OSError("another program answers there")
    except BaseException:
        connection.close()
        raise
    return connection


# The answers.

MARK = "doctor: "
"""Begin of an answer; shells that greet print other lines."""

IMPORTED = "imported: "
IMPORTS = f"""
import json, resource
import torch
from deepspeed.accelerator import get_accelerator
has_cuda = torch.cuda.is_available()
print({IMPORTED!r} + json.dumps({{
    "accelerator": get_accelerator().device_name(),
    "num_devices": torch.cuda.device_count() if has_cuda else 0,
    "cuda": torch.version.cuda,
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_cuda else None,
    "resident_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
}}), flush=True)
"""

TOLD_TO_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM)

LONGEST_BEGIN_S = 1.0
"""Seconds that the begin of a process takes at most."""

LIFETIME_S = 900
"""Seconds after which a probe ends by itself: a connection that is cut may never be closed."""


class Probe:
    """The questions, each a method, and what has to be undone at the end."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []
        self._processes: list[subprocess.Popen[str]] = []
        self._files: list[Path] = []
        self._beginning = threading.Lock()

    def facts(
        self, python: str, packages: list[str], project: str, directory: str, checkpoints: str, hosts: list[str]
    ) -> dict[str, Any]:
        """Return the facts of this host."""
        return {
            "software": software(python, packages, project, directory),
            "devices": devices(),
            "resources": resources(),
            "interfaces": interfaces(),
            "names": names(hosts),
            "variables": variables(),
            "folder": folder(checkpoints),
        }

    def clock(self) -> float:
        """Return seconds since 1970 by the clock of this host."""
        return time.time()

    def imports(self, variables: dict[str, str], directory: str, seconds: float) -> dict[str, Any]:
        """Import torch and DeepSpeed as a rank would, and return their versions and devices.

        Args:
            seconds: after which it is given up.
        """
        with self._beginning:
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
            self._processes.append(process)
        try:
            told, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return {"error": f"no answer within {seconds:.0f} s"}
        for line in told.splitlines():
            if line.startswith(IMPORTED):
                return dict(json.loads(line.removeprefix(IMPORTED)))
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        return {"error": lines[-1][:300] if lines else f"exit code {process.returncode}"}

    def listen(self, port: int, token: str) -> int:
        """Listen on a port (0 = any that is free), and return it."""
        listener = Listener(port, token)
        self._listeners.append(listener)
        return listener.port

    def reach(self, address: str, port: int, token: str) -> dict[str, Any]:
        """Return the address of this host on a connection to another, and the fastest of some round trips."""
        with connect(address, port, token) as connection:
            connection.sendall(ECHO)
            fastest = float("inf")
            for _ in range(ROUND_TRIPS):
                begun = time.perf_counter()
                connection.sendall(b".")
                if not connection.recv(1):
                    raise ConnectionResetError("the connection was closed")
                fastest = min(fastest, time.perf_counter() - begun)
            return {"own": connection.getsockname()[0], "round_trip_s": fastest}

    def bandwidth(self, address: str, port: int, token: str, seconds: float) -> float:
        """Return bytes per second to another host, from the first byte sent to the word that the last one came."""
        buffer = memoryview(bytes(BUFFER_BYTES))
        with connect(address, port, token) as connection:
            connection.settimeout(2 * LIMIT_S)
            connection.sendall(SINK)
            begun = time.perf_counter()
            while time.perf_counter() - begun < seconds:
                connection.sendall(buffer)
            connection.shutdown(socket.SHUT_WR)
            told = connection.recv(8)
            if len(told) < 8:
                raise ConnectionResetError("the connection was closed")
            return int.from_bytes(told, "big") / (time.perf_counter() - begun)

    def write(self, directory: str, token: str) -> None:
        """Write the file that other hosts look for; it goes with this process."""
        path = Path(directory, PREFIX + token)
        # Known before it is there, and not written once files are taken away, so that it is never left behind.
        with self._beginning:
            self._files.append(path)
            with path.open("x") as file:
                file.write(token)
                file.flush()
                os.fsync(file.fileno())

    def sees(self, directory: str, token: str) -> bool:
        """Whether this host has the file of another."""
        try:
            os.listdir(directory)  # A network file system looks again, not into what it remembers.
            return Path(directory, PREFIX + token).read_text() == token
        except OSError:
            return False

    def end(self) -> None:
        """Undo everything, for ever: nothing more is begun."""
        self._beginning.acquire(timeout=LONGEST_BEGIN_S)
        for listener in list(self._listeners):
            listener.close()
        for process in list(self._processes):
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
        for path in list(self._files):
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def leave(self) -> None:
        """Undo everything, and end this process."""
        self.end()
        os._exit(0)


QUESTIONS = ("facts", "clock", "imports", "listen", "reach", "bandwidth", "write", "sees")


def serve() -> None:
    """Answer until the input is closed."""
    probe = Probe()
    questions: queue.SimpleQueue[str] = queue.SimpleQueue()

    def wait_for_signals() -> None:
        signal.sigwait(TOLD_TO_END)
        probe.leave()

    def read() -> None:
        for line in sys.stdin:
            questions.put(line)
        probe.leave()

    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    # A thread waits for them: this one may be anywhere, also in the middle of beginning what is to be undone.
    signal.pthread_sigmask(signal.SIG_BLOCK, TOLD_TO_END)
    threading.Thread(target=wait_for_signals, daemon=True).start()
    signal.alarm(LIFETIME_S)
    threading.Thread(target=read, daemon=True).start()
    while True:
        question = json.loads(questions.get())
        assert question["ask"] in QUESTIONS
        try:
            answer = {"answer": getattr(probe, question["ask"])(**question["with"])}
        except TimeoutError:
            answer = {"fault": "no answer"}
        except OSError as error:
            answer = {"fault": (os.strerror(error.errno) if error.errno else str(error)).lower()}
        try:
            print(MARK + json.dumps(answer), flush=True)
        except OSError:
            probe.leave()
