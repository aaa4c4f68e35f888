"""Accelerators of a host by nvidia-smi, and what torch and DeepSpeed say of them in a process of their own."""

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable

from megatron_terapipe.doctor.facts import Device, Imports

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
