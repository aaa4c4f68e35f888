"""From bytes that are counted to bytes that are taken: where the constants of `MemoryOverheads` enter."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.cost.memory.live import Held
from megatron_terapipe.search.cost.prediction import RankMemory
from megatron_terapipe.search.inputs.cluster import Cluster
from megatron_terapipe.search.op_times.constants import constant
from megatron_terapipe.search.software.description import Software


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryOverheads:
    """Constants of the memory model. None of them belongs to a strategy, a model or a row of a table."""

    framework_bytes: float = constant(3.0e9, 0.7)
    """On each device: context, kernels, workspaces of libraries."""
    communicator_bytes: float = constant(0.5e9, 0.7)
    """Buffers of one communicator that a rank is in, whatever it sends."""
    state_factor: float = constant(1.02, 0.03)
    """Memory taken for a byte of weights, gradients and optimizer state."""
    activation_factor: float = constant(1.06, 0.08)
    """Memory taken for a byte of what comes and goes, with what the allocator cannot use."""
    working_factor: float = constant(1.0, 0.5)
    """Bytes that an op holds while it runs, in those that its formula counts."""
    usable_share: float = 1.0
    """Part of a device's memory that predictions may fill; above it, a strategy is said not to fit."""


ON_CPU = MemoryOverheads(
    framework_bytes=0.5e9, communicator_bytes=20e6, state_factor=1.0, activation_factor=1.03, working_factor=1.0
)
"""Overheads of ranks on CPUs: a process with PyTorch and DeepSpeed loaded, gloo, and malloc."""


def default_overheads(cluster: Cluster, software: Software) -> MemoryOverheads:
    """Constants before anything was measured.

    Args:
        software: the trainer, which says what its allocator cannot use of a GPU.
    """
    if not any(node.device.is_gpu for node in cluster.nodes):
        return ON_CPU
    return MemoryOverheads(activation_factor=software.allocator_factor)


ScalarOrArray = NDArray[np.float64] | float


class Counted(NamedTuple):
    """Bytes of one pipeline rank by formulas alone; numbers, or arrays that broadcast against each other."""

    weights: ScalarOrArray
    """What products read."""
    gradients: ScalarOrArray
    """Sums over micro-batches."""
    optimizer: ScalarOrArray
    """Copies in fp32, and moments."""
    step: ScalarOrArray
    """More while the optimizer steps, when no activation is left."""
    activations: ScalarOrArray = 0.0
    """Kept from forward to backward, at the peak."""
    key_values: ScalarOrArray = 0.0
    """Of live token slices, with gradients."""
    logits: ScalarOrArray = 0.0
    """Logits, and what the loss keeps."""
    working: ScalarOrArray = 0.0
    """What the op of the peak holds while it runs."""
    buffers: ScalarOrArray = 0.0
    """Messages between stages, and ZeRO's buckets."""
    communicators: ScalarOrArray = 0.0
    """How many the rank is in."""

    def holding(self, held: Held, messages: ScalarOrArray) -> "Counted":
        """Add the bytes that are allocated and freed within an iteration; arguments broadcast.

        Args:
            held: bytes at the moment of the peak.
            messages: bytes of messages between stages.
        """
        return self._replace(**held._asdict(), buffers=self.buffers + messages)


def total_bytes(counted: Counted, overheads: MemoryOverheads) -> ScalarOrArray:
    """Peak bytes of a rank; arguments broadcast."""
    states = counted.weights + counted.gradients + counted.optimizer
    fixed = overheads.framework_bytes + counted.communicators * overheads.communicator_bytes
    return (
        overheads.state_factor * states
        + np.maximum(counted.step, _moving(counted, overheads))
        + counted.buffers
        + fixed
    )


def assemble(counted: Counted, overheads: MemoryOverheads) -> RankMemory:
    """Peak memory of a rank, by kind; the kinds add up to `total_bytes`."""
    # The optimizer steps when the last activation is gone: the peak is of the one or of the other.
    steps = float(counted.step) > float(_moving(counted, overheads))
    factor = 0.0 if steps else overheads.activation_factor
    working = float(counted.step) if steps else factor * overheads.working_factor * float(counted.working)
    return RankMemory(
        weights=overheads.state_factor * float(counted.weights),
        gradients=overheads.state_factor * float(counted.gradients),
        optimizer=overheads.state_factor * float(counted.optimizer),
        activations=factor * float(counted.activations),
        key_values=factor * float(counted.key_values),
        logits=factor * float(counted.logits),
        buffers=working + float(counted.buffers),
        framework=overheads.framework_bytes + float(counted.communicators) * overheads.communicator_bytes,
    )


def _moving(counted: Counted, overheads: MemoryOverheads) -> ScalarOrArray:
    """Bytes that are allocated and freed within an iteration."""
    kept = counted.activations + counted.key_values + counted.logits
    return overheads.activation_factor * (kept + overheads.working_factor * counted.working)
