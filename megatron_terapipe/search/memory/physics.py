"""What no count of tensors says of memory, the same for every strategy: of the driver, of NCCL, of the allocator."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megatron_terapipe.search.cluster import Cluster


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPhysics:
    """Constants of the memory model. None of them belongs to a strategy, a model or a row of a table.

    Attributes:
        framework_bytes: on each device: context, kernels, workspaces of libraries.
        communicator_bytes: buffers of one communicator that a rank is in, whatever it sends.
        state_factor: memory taken for a byte of weights, gradients and optimizer state.
        activation_factor: memory taken for a byte of what comes and goes, with what the allocator cannot use.
        working_factor: bytes that an op holds while it runs, in those that its formula counts.
        usable_share: part of a device's memory that predictions may fill; above it, a strategy is said not to fit.
    """

    framework_bytes: float = 3.0e9
    communicator_bytes: float = 0.5e9
    state_factor: float = 1.02
    activation_factor: float = 1.06
    working_factor: float = 1.0
    usable_share: float = 1.0


ON_CPU = MemoryPhysics(
    framework_bytes=0.5e9, communicator_bytes=20e6, state_factor=1.0, activation_factor=1.03, working_factor=1.0
)
"""Of ranks on CPUs: a process with PyTorch and DeepSpeed loaded, gloo, and malloc."""


def default_physics(cluster: Cluster) -> MemoryPhysics:
    """Constants before anything was measured, by what a cluster is made of."""
    return MemoryPhysics() if any(node.device.is_gpu for node in cluster.nodes) else ON_CPU


PRIOR_WIDTH: Mapping[str, float] = MappingProxyType(
    {
        "framework_bytes": 0.7,
        "communicator_bytes": 0.7,
        "state_factor": 0.03,
        "activation_factor": 0.08,
        "working_factor": 0.5,
    }
)
"""Fields that calibration may move, and the standard deviation of their logarithms before any trial was seen."""
