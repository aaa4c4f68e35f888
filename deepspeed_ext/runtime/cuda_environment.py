"""The environment variables that CUDA, torch's allocator and NCCL read when they start.

Each process sets them for itself before it imports torch, so that they are the same on every host: DeepSpeed's launcher
passes on only a few families of variables. A value that is set already stays. Torch is not imported here.
"""

import logging
import os
import re
from collections.abc import Mapping, MutableMapping, Sequence
from itertools import takewhile
from typing import NamedTuple

from deepspeed_ext.plan.errors import UserError

__all__ = ["prepare_cuda_environment"]

HARDWARE_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"

_DRIVERS_QUEUES, _MOST_QUEUES = 8, 32
"""Queues that the driver makes by default, and the most that it makes."""

_DEVICE = re.compile(r"\d+|(GPU|MIG)-[\w/-]+")
"""An entry of CUDA_VISIBLE_DEVICES."""

_DEVICE_FILES = ("/dev/nvidiactl", "/dev/dxg")
"""Files by which the driver is reached: on Linux, and on Linux under Windows."""


class Variable(NamedTuple):
    """A variable that this package sets where it is not set."""

    name: str
    value: str
    others: tuple[str, ...] = ()
    """The other values with which sums have one order: torch's for cuBLAS, Megatron's for NCCL."""
    alias: str = ""
    """An older name, which torch reads first; empty for none."""


VARIABLES = (
    # With fewer queues than streams, a kernel waits for one of another stream that itself waits for a message.
    Variable(HARDWARE_QUEUES, str(_MOST_QUEUES)),
    # A kernel that is loaded when first used may wait until the device is empty, and a receive that is posted ahead
    # keeps it busy (CUDA programming guide, lazy loading, potential hazards). This also loads kernels that are first
    # used after the first step, by another rank or in another shape. `MemoryOverheads` counts its memory.
    Variable("CUDA_MODULE_LOADING", "EAGER"),
    # Token slices have as many sizes as there are lengths and prefixes. Blocks of fixed sizes fragment until the
    # allocator frees them, and `cudaFree` waits for the whole device.
    Variable("PYTORCH_ALLOC_CONF", "expandable_segments:True", alias="PYTORCH_CUDA_ALLOC_CONF"),
    # A message that is ready leaves before the kernels that were launched earlier have all begun.
    Variable("TORCH_NCCL_HIGH_PRIORITY", "1"),
    # The warning is of messages that share a communicator, and each channel has its own.
    Variable("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false"),
)


REPEATABLE = (
    # Products choose their algorithm by the memory that is free, unless it has a fixed size (cuBLAS, reproducibility).
    Variable("CUBLAS_WORKSPACE_CONFIG", ":4096:8", (":16:8",)),
    # NCCL would choose an order of its sums by measurements of the links.
    Variable("NCCL_ALGO", "Ring", ("Tree", "CollnetDirect", "CollnetChain", "^NVLS")),
)
"""Variables for a fixed order of all sums."""

_LOCKING = {"CUDA_LAUNCH_BLOCKING": "every launch", "PYTORCH_NO_CUDA_MEMORY_CACHING": "every release of memory"}
"""Variables for debugging, and the calls that they make wait."""

_BLOCKING_WAIT = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")


def prepare_cuda_environment(
    environment: MutableMapping[str, str] = os.environ,
    *,
    num_pipeline_ranks: int,
    deterministic: bool = False,
    has_device: bool | None = None,
) -> list[str]:
    """Set missing variables, and check the others. Call it before torch is imported.

    Args:
        num_pipeline_ranks: ranks on the pipeline axis; a single one exchanges no messages.
        deterministic: whether to set the variables that make a run repeatable to the bit.
        has_device: whether there is a CUDA device; by default, whether the driver's device file is there.

    Returns:
        Lines for the log: the variables that were set here, earlier settings that were kept, and warnings. Without CUDA
        there are none, and no variable is set.
    """
    if not will_use_cuda(environment, has_device=has_device):
        return []
    warnings = check_cuda_environment(environment, num_pipeline_ranks=num_pipeline_ranks)
    kept, new = {}, {}
    for variable in VARIABLES + REPEATABLE * deterministic:
        name = next((each for each in (variable.alias, variable.name) if each in environment), None)
        if name is None:
            new[variable.name] = variable.value
            continue
        kept[name] = environment[name]
        if variable in REPEATABLE and kept[name] not in (variable.value, *variable.others):
            raise UserError(
                f"{name}={kept[name]} leaves the order of sums open, and the run is to be deterministic: unset "
                f"it, or set {variable.value}"
            )
    environment.update(new)
    parts = [
        f"{done} {', '.join(f'{name}={value}' for name, value in values.items())}"
        for done, values in (("set", new), ("kept", kept))
        if values
    ]
    return [f"CUDA environment: {'; '.join(parts)}", *(f"warning: {line}" for line in warnings)]


def expect_cpu() -> None:
    """Leave out the warning of DeepSpeed, in each process, that it found no device, where no driver of CUDA is."""
    if not will_use_cuda(os.environ):
        logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())


def will_use_cuda(environment: Mapping[str, str], *, has_device: bool | None = None) -> bool:
    """Whether DeepSpeed will use CUDA in a process.

    Args:
        environment: variables of the process; `DS_ACCELERATOR` decides if it is set.
    """
    chosen = environment.get("DS_ACCELERATOR")
    if chosen is not None:
        return chosen == "cuda"
    if visible_devices(environment) == []:
        return False
    return any(map(os.path.exists, _DEVICE_FILES)) if has_device is None else has_device


def visible_devices(environment: Mapping[str, str]) -> list[str] | None:
    """The devices that CUDA_VISIBLE_DEVICES shows: numbers, UUIDs or MIG instances; None if it is not set, for all.

    The first entry of another form ends the list, such as -1 or Slurm's NoDevFiles (CUDA programming guide, environment
    variables).
    """
    if "CUDA_VISIBLE_DEVICES" not in environment:
        return None
    entries = environment["CUDA_VISIBLE_DEVICES"].split(",")
    return [*takewhile(_DEVICE.fullmatch, (entry.strip() for entry in entries))]


def hardware_queues(environment: Mapping[str, str] = os.environ) -> int:
    """Number of hardware queues of a CUDA process, over which its streams are spread."""
    value = environment.get(HARDWARE_QUEUES, str(_DRIVERS_QUEUES))
    if not value.strip().isdecimal() or not 1 <= int(value) <= _MOST_QUEUES:
        raise UserError(
            f"{HARDWARE_QUEUES}={value!r} is not a number from 1 to {_MOST_QUEUES}: unset it, or set {_MOST_QUEUES}"
        )
    return int(value)


def check_cuda_environment(environment: Mapping[str, str], *, num_pipeline_ranks: int) -> list[str]:
    """Raise a `UserError` for values under which a pipeline locks, and return a warning for each unwise one.

    The check of the programs decides whether the schedule ends with this number of hardware queues.
    """
    queues = hardware_queues(environment)
    if num_pipeline_ranks == 1:
        return []
    for name, waits in _LOCKING.items():
        if environment.get(name, "0") not in ("", "0"):
            raise UserError(
                f"{name}={environment[name]} makes {waits} wait for the device, and a receive that is posted ahead "
                "keeps that busy: unset it, or train without pipeline parallelism"
            )
    warnings = []
    if queues < _DRIVERS_QUEUES:
        warnings.append(
            f"{HARDWARE_QUEUES}={queues} lets streams hold each other up: unset it, unless something else needs it"
        )
    if environment.get("CUDA_MODULE_LOADING") == "LAZY":
        warnings.append("CUDA_MODULE_LOADING=LAZY lets the first use of a kernel wait for the device: unset it")
    blocking = next((name for name in _BLOCKING_WAIT if environment.get(name, "0") not in ("", "0")), None)
    if blocking is not None:
        warnings.append(f"{blocking}={environment[blocking]} makes the host wait for every message: unset it")
    return warnings


def check_same_environment(by_rank: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> list[str]:
    """Compare the `compared_variables` of all ranks, on their hosts; return a warning for each in which two differ."""
    warnings = []
    for name in dict.fromkeys(name for values in by_rank for name in values):
        first = by_rank[0].get(name)
        other = next((rank for rank, values in enumerate(by_rank) if values.get(name) != first), None)
        if other is None:
            continue
        theirs, ours = f"rank {other} (host {hosts[other]})", f"rank 0 (host {hosts[0]})"
        difference = f"{_text(name, by_rank[other].get(name))} on {theirs} and {_text(name, first)} on {ours}"
        remedy = "set it for all hosts, such as in .deepspeed_env, or for none"
        if name == HARDWARE_QUEUES:
            raise UserError(f"{difference}, but the check for deadlocks takes one number for all: {remedy}")
        warnings.append(f"{difference}: {remedy}")
    return warnings


def compared_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of a process that should be the same on all ranks."""
    names = (name for variable in VARIABLES + REPEATABLE for name in (variable.name, variable.alias))
    return {name: environment[name] for name in (*names, *_LOCKING, *_BLOCKING_WAIT) if name in environment}


def _text(name: str, value: str | None) -> str:
    return f"{name} unset" if value is None else f"{name}={value}"
