"""From bytes that are counted to bytes that are taken: where the constants of `MemoryPhysics` enter."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.memory.physics import MemoryPhysics
from megatron_terapipe.search.prediction import RankMemory

Grid = NDArray[np.float64] | float


class Counted(NamedTuple):
    """Bytes of one pipeline rank by formulas alone; numbers, or arrays that broadcast against each other.

    Attributes:
        weights: what products read.
        gradients: sums over micro-batches.
        optimizer: copies in fp32, and moments.
        step: more while the optimizer steps, when no activation is left.
        activations: kept from forward to backward, at the peak.
        key_values: of live token slices, with gradients.
        logits: logits, and what the loss keeps.
        working: what the op of the peak holds while it runs.
        buffers: messages between stages, and ZeRO's buckets.
        communicators: how many the rank is in.
    """

    weights: Grid
    gradients: Grid
    optimizer: Grid
    step: Grid
    activations: Grid
    key_values: Grid
    logits: Grid
    working: Grid
    buffers: Grid
    communicators: Grid


def total_bytes(counted: Counted, physics: MemoryPhysics) -> Grid:
    """Peak of a rank; broadcasts."""
    states = counted.weights + counted.gradients + counted.optimizer
    fixed = physics.framework_bytes + counted.communicators * physics.communicator_bytes
    return physics.state_factor * states + np.maximum(counted.step, _moving(counted, physics)) + counted.buffers + fixed


def assemble(counted: Counted, physics: MemoryPhysics) -> RankMemory:
    """Peak of a rank, by what it is; they add up to `total_bytes`."""
    # The optimizer steps when the last activation is gone: the peak is of the one or of the other.
    steps = float(counted.step) > float(_moving(counted, physics))
    factor = 0.0 if steps else physics.activation_factor
    working = float(counted.step) if steps else factor * physics.working_factor * float(counted.working)
    return RankMemory(
        weights=physics.state_factor * float(counted.weights),
        gradients=physics.state_factor * float(counted.gradients),
        optimizer=physics.state_factor * float(counted.optimizer),
        activations=factor * float(counted.activations),
        key_values=factor * float(counted.key_values),
        logits=factor * float(counted.logits),
        buffers=working + float(counted.buffers),
        framework=physics.framework_bytes + float(counted.communicators) * physics.communicator_bytes,
    )


def _moving(counted: Counted, physics: MemoryPhysics) -> Grid:
    """What comes and goes within an iteration."""
    kept = counted.activations + counted.key_values + counted.logits
    return physics.activation_factor * (kept + physics.working_factor * counted.working)
