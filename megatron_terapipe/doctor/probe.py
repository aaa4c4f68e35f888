"""The facts of a host: resources and interfaces, devices, software, names and variables, the folder to save to.

The sources of this module, `facts` and `agent` are sent over ssh and run there: they import the standard library only.
"""

import csv
import fcntl
import hashlib
import json
import os
import platform
import re
import resource
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from ipaddress import IPv6Address
from pathlib import Path

from megatron_terapipe.doctor.facts import Device, Folder, Imports, Interface, Names, Resources, Software

ASK_ADDRESS = 0x8915
"""SIOCGIFADDR of Linux."""

IS_UP = 0x1
"""IFF_UP of Linux."""

CONTAINER = Path("/sys/fs/cgroup")


def resources() -> Resources:
    """Return cores, memory and limits of a process here."""
    total, free = _memory()
    shared = _room("/dev/shm")  # noqa: S108 - asked for its size
    return Resources(
        cores=_cores(),
        memory_bytes=total,
        free_memory_bytes=free,
        shared_memory_bytes=None if shared is None else shared[0],
        free_shared_memory_bytes=0 if shared is None else shared[1],
        locked_memory_bytes=_limit(resource.RLIMIT_MEMLOCK),
        open_files=_limit(resource.RLIMIT_NOFILE),
        processes=_limit(resource.RLIMIT_NPROC),
        has_infiniband=any(Path("/sys/class/infiniband").glob("*")),
        outgoing_ports=_outgoing_ports(),
    )


def interfaces() -> tuple[Interface, ...]:
    """Return the network interfaces of this host."""
    return tuple(
        Interface(
            name=name,
            addresses=(*_ipv4(name), *_ipv6(name)),
            is_up=bool(int(_read(f"/sys/class/net/{name}/flags") or "0", 16) & IS_UP),
            speed_mbit=_speed(name),
            largest_packet=int(_read(f"/sys/class/net/{name}/mtu") or 0),
        )
        for _, name in socket.if_nameindex()
    )


def _outgoing_ports() -> tuple[int, int] | None:
    words = _read("/proc/sys/net/ipv4/ip_local_port_range").split()
    return (int(words[0]), int(words[1])) if len(words) == 2 else None


def _cores() -> int:
    cores = len(os.sched_getaffinity(0))
    quota, _, period = _read(CONTAINER / "cpu.max").partition(" ")
    # A container may have a share of the cores that it sees.
    return max(1, min(cores, int(quota) // int(period))) if quota.isdecimal() and period.isdecimal() else cores


def _memory() -> tuple[int, int]:
    lines = (line.split() for line in _read("/proc/meminfo").splitlines())
    kib = {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1}
    total, free = 1024 * kib.get("MemTotal", 0), 1024 * kib.get("MemAvailable", 0)
    limit, used = _read(CONTAINER / "memory.max"), _read(CONTAINER / "memory.current")
    if limit.isdecimal() and used.isdecimal() and int(limit) < total:
        return int(limit), min(free, max(0, int(limit) - int(used)))
    return total, free


def _room(path: str) -> tuple[int, int] | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _ipv4(name: str) -> tuple[str, ...]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            answer = fcntl.ioctl(asked, ASK_ADDRESS, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return ()
    return (socket.inet_ntoa(answer[20:24]),)


def _ipv6(name: str) -> tuple[str, ...]:
    lines = (line.split() for line in _read("/proc/net/if_inet6").splitlines())
    return tuple(str(IPv6Address(int(words[0], 16))) for words in lines if words[-1] == name)


def _speed(name: str) -> int | None:
    speed = _read(f"/sys/class/net/{name}/speed")
    return int(speed) if speed.isdecimal() and int(speed) > 0 else None


def _read(path: "str | Path") -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


MIB = 2**20
FIELDS = "uuid,name,memory.total,memory.free,driver_version"
MARK = "imported: "

PROGRAM = f"""
import json, resource
import torch
from deepspeed.accelerator import get_accelerator
has_cuda = torch.cuda.is_available()
print({MARK!r} + json.dumps({{
    "accelerator": get_accelerator().device_name(),
    "num_devices": torch.cuda.device_count() if has_cuda else 0,
    "cuda": torch.version.cuda,
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_cuda else None,
    "resident_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
}}), flush=True)
"""


def devices() -> tuple[Device, ...]:
    """Return the accelerators that NVIDIA's driver lists; none where it has no tool to ask."""
    processes: dict[str, list[str]] = {}
    for uuid, name, number in _asked("--query-compute-apps=gpu_uuid,process_name,pid"):
        processes.setdefault(uuid, []).append(f"{os.path.basename(name)} ({number})")
    return tuple(
        Device(
            name=name,
            memory_bytes=int(total) * MIB,
            free_bytes=int(free) * MIB,
            processes=tuple(processes.get(uuid, ())),
            driver=driver,
        )
        for uuid, name, total, free, driver in _asked(f"--query-gpu={FIELDS}")
        if total.isdecimal() and free.isdecimal()
    )


def _asked(query: str) -> list[list[str]]:
    words = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return []
    length = query.count(",") + 1
    rows = csv.reader(done.stdout.splitlines(), skipinitialspace=True)
    return [row for row in rows if len(row) == length] if done.returncode == 0 else []


def imports(
    *, variables: dict[str, str], directory: str, limit_s: float, begin: "Callable[..., subprocess.Popen[str]]"
) -> Imports:
    """Return what torch and DeepSpeed say once they are imported, as a rank would import them.

    Args:
        limit_s: seconds after which it is given up.
        begin: begins a process as `subprocess.Popen` does, and ends it with this one.
    """
    process = begin(
        [sys.executable, "-c", PROGRAM],
        cwd=directory if os.path.isdir(directory) else None,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        told, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return Imports(error=f"no answer within {limit_s:.0f} s")
    line = next((line for line in told.splitlines() if line.startswith(MARK)), None)
    if line is None:
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        return Imports(error=lines[-1][:300] if lines else f"exit code {process.returncode}")
    return Imports(**json.loads(line[len(MARK) :]))


PROGRAMS = ("ssh", "pdsh", "mpirun", "mpiexec", "srun")
SOURCES = ("deepspeed_ext", "megatron_terapipe")


def software(*, python: str, packages: list[str], project: str, directory: str) -> Software:
    """Return what is installed here.

    Args:
        project: folder where this project should be.
    """
    return Software(
        python=python if os.access(python, os.X_OK) else None,
        python_version=platform.python_version(),
        packages={name: found for name in packages if (found := _version(name)) is not None},
        apex=_apex(),
        toolkit=_toolkit(),
        digest=digest_of(Path(project)),
        programs=programs(),
        has_folder=os.path.isdir(directory),
    )


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
    """Return whose apex is installed: NVIDIA's has fused optimizers, PyPI's package of that name has none."""
    try:
        found = find_spec("apex")
    except (ImportError, ValueError):
        return None
    folders = list(found.submodule_search_locations or ()) if found is not None else []
    if found is None:
        return None
    return "nvidia" if any(Path(each, "optimizers", "fused_adam.py").exists() for each in folders) else "other"


def _toolkit() -> str | None:
    compiler = shutil.which("nvcc") or os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc")
    try:
        told = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"release (\d+\.\d+)", told)
    return found[1] if found else None


READ_BY_RANKS = (
    *("NCCL_", "GLOO_", "CUDA_", "CUBLAS_", "TORCH_", "PYTORCH_", "OMP_", "MKL_", "KMP_", "UCX_", "FI_", "TP_"),
    *("DS_ACCELERATOR", "MASTER_ADDR", "MASTER_PORT", "LD_PRELOAD", "PYTHONPATH"),
)
"""Beginnings of variables that change a run. No others are looked at: they may hold passwords."""

MOST_LOOKED_UP = 16


def names(others: list[str]) -> Names:
    """Return names and addresses as this host knows them."""
    hostname = socket.gethostname()
    with ThreadPoolExecutor(MOST_LOOKED_UP) as pool:
        own, *found = pool.map(_addresses, [hostname, *others])
    return Names(
        hostname=hostname,
        own_addresses=own,
        listed_addresses=_listed(),
        others=dict(zip(others, found, strict=True)),
    )


def variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that change a run."""
    return {name: value for name, value in sorted(environment.items()) if name.startswith(READ_BY_RANKS)}


def _addresses(name: str) -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found))


def _listed() -> tuple[str, ...]:
    try:
        told = subprocess.run(["hostname", "-I"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(told.stdout.split()) if told.returncode == 0 else ()


PREFIX = ".terapipe-doctor-"


def folder(path: str, limit_s: float) -> Folder:
    """Return what can be done in a directory, or in the nearest one above it that exists: a run makes the others.

    Args:
        limit_s: seconds in which its disk must answer: a file server that is gone lets its users wait for ever.
    """
    found: list[Folder] = []
    looking = threading.Thread(target=lambda: found.append(_tried(path)), daemon=True)
    looking.start()
    looking.join(limit_s)
    return found[0] if found else Folder(path=path, fault=f"the disk does not answer in {limit_s:.0f} s", free_bytes=0)


def _tried(path: str) -> Folder:
    existing = Path(path)
    while not existing.is_dir() and existing != existing.parent:
        if existing.exists():
            return Folder(path=str(existing), fault=f"{existing} is a file", free_bytes=0)
        existing = existing.parent
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=PREFIX) as file:
            file.write(b"terapipe doctor\n" * 256)
            file.flush()
            os.fsync(file.fileno())
        fault = None
    except OSError as error:
        fault = error.strerror or str(error)
    room = os.statvfs(existing)
    return Folder(path=str(existing), fault=fault, free_bytes=room.f_frsize * room.f_bavail)


def token_path(directory: str, token: str) -> Path:
    """Return the path of a file that other hosts look for."""
    return Path(directory, PREFIX + token)


def write_token(path: Path, token: str) -> None:
    """Write a file that other hosts look for.

    Raises:
        OSError: if it cannot be written.
    """
    with path.open("x") as file:
        file.write(token)
        file.flush()
        os.fsync(file.fileno())


def sees_token(directory: str, token: str) -> bool:
    """Whether the file of another host is here."""
    try:
        os.listdir(directory)  # A network file system looks again, not into what it remembers.
        return token_path(directory, token).read_text() == token
    except OSError:
        return False
