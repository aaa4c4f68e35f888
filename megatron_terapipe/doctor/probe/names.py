"""Names and addresses as a host looks them up, and the variables that torch, CUDA and the network read."""

import os
import socket
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from megatron_terapipe.doctor.facts import Names

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
