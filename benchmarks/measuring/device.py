"""The device of this machine, its software by name, and the ways in which several ranks can share one device."""

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
from deepspeed.accelerator import get_accelerator

from deepspeed_ext.runtime.cuda_environment import prepare_cuda_environment
from deepspeed_ext.runtime.initialize import init_distributed


def has_gpu() -> bool:
    """Whether DeepSpeed takes a CUDA device here."""
    return get_accelerator().device_name() == "cuda" and torch.cuda.is_available()


def software() -> dict[str, str]:
    """Names and versions of what a result depends on."""
    named = {"torch": torch.__version__, "deepspeed": importlib.metadata.version("deepspeed")}
    if has_gpu():
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        named = {
            "GPU": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, {memory:.0f} GiB",
            "driver": _driver_version(),
            **named,
            "CUDA": str(torch.version.cuda),
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        }
    else:
        named = {"device": get_accelerator().device_name(), **named}
    return named | {"Python": platform.python_version(), "commit": _commit()}


@dataclass(frozen=True)
class Sharing:
    """A way to give every rank a device."""

    name: str
    variables: Mapping[str, str]
    """Of the environment, the same for all ranks."""
    own: str | None = None
    """Name of a variable that gets another value on each rank; None if there is none."""
    device_each: bool = False
    """Whether every rank has a device of its own."""

    def of_rank(self, rank: int, more: Mapping[str, str]) -> dict[str, str]:
        """Variables that a rank needs, beside those that it inherits.

        Args:
            more: others, which count more than those that the trainer would set.
        """
        found = {"LOCAL_RANK": str(rank if self.device_each else 0), **self.variables, **more}
        if self.own is not None:
            found[self.own] = f"rank{rank}"
        inherited = {**os.environ, **found}
        prepared = dict(inherited)
        prepare_cuda_environment(prepared, num_pipeline_ranks=1, has_device=has_gpu())
        return found | {name: prepared[name] for name in prepared.keys() - inherited.keys()}


LOOPBACK = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
"""Ranks that take each other for other hosts talk over the network, and this machine's own is enough."""

SHARINGS = (
    # NCCL refuses two ranks with one device on one host. It knows a host by this variable, if it is set.
    Sharing("one GPU, NCCL_HOSTID", LOOPBACK, own="NCCL_HOSTID"),
    # NCCL 2.30 and later can be told to allow it.
    Sharing("one GPU, NCCL_MULTI_RANK_GPU_ENABLE", LOOPBACK | {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}),
)


def possible_sharings(num_ranks: int) -> tuple[Sharing, ...]:
    """Ways to try, best first: gloo on a CPU, a device for each rank where there are enough, one for all."""
    if not has_gpu():
        return (Sharing("CPU, gloo", {}),)
    if torch.cuda.device_count() >= num_ranks:
        return (Sharing("a GPU for each rank", {}, device_each=True), *SHARINGS)
    return SHARINGS


def join(timeout_s: float) -> None:
    """Join the other ranks on this rank's device, or over gloo with one thread on a CPU."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        torch.set_num_threads(1)
    else:
        accelerator.set_device(int(os.environ["LOCAL_RANK"]))
    backend = accelerator.communication_backend_name() if has_gpu() else "gloo"
    init_distributed(dist_backend=backend, timeout=timedelta(seconds=timeout_s), verbose=False)


def _driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return _first_line(command) or "unknown"


def _commit() -> str:
    return _first_line(["git", "-C", os.path.dirname(__file__), "describe", "--always", "--dirty"]) or "unknown"


def _first_line(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else ""
