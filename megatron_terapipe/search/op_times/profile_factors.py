"""Factors between training and a profile that was measured op by op, the same for every strategy.

A profile times one thing after the other. In training all ranks of a machine compute, send and step at the same time,
share its memory and caches, and wait for each other, so everything of a kind may take longer than it did alone.
"""

from dataclasses import dataclass, replace

import numpy as np

from megatron_terapipe.search.inputs.layer import Layer
from megatron_terapipe.search.op_times.constants import constant
from megatron_terapipe.search.op_times.hardware_efficiency import HardwareEfficiency
from megatron_terapipe.search.op_times.layer_times import LayerQuery, LayerTimes, OpTimes


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileFactors:
    """Seconds in training per second of the profile.

    The priors are guesses: that of `ops` is wide enough for two ranks that share what one had alone, that of `messages`
    for collectives that wait for a busy processor.
    """

    ops: float = constant(1.0, 0.4)
    """Of what layers compute."""
    messages: float = constant(1.0, 0.8)
    """Of collectives and of messages between stages, beyond the latency of their links."""
    gaps: float = constant(1.0, 0.7)
    """Of what the executor needs between two ops of a rank."""
    step: float = constant(1.0, 0.5)
    """Of what comes once an iteration: the optimizer, and what an iteration takes however small it is."""

    def efficiency(self, measured: HardwareEfficiency) -> HardwareEfficiency:
        """HardwareEfficiency of training."""
        return replace(
            measured,
            inside_efficiency=measured.inside_efficiency / self.messages,
            network_efficiency=measured.network_efficiency / self.messages,
            transfer_inside_efficiency=measured.transfer_inside_efficiency / self.messages,
            transfer_network_efficiency=measured.transfer_network_efficiency / self.messages,
            collective_s=measured.collective_s * self.messages,
            transfer_s=measured.transfer_s * self.messages,
            op_s=measured.op_s * self.gaps,
            optimizer_passes=measured.optimizer_passes * self.step,
            iteration_s=measured.iteration_s * self.step,
        )


@dataclass(frozen=True)
class ScaledTimes:
    """Op times of which every one takes longer by the same factor; an `OpTimes`."""

    op_times: OpTimes
    """Measured."""
    factor: float
    """Seconds per second of those."""

    @property
    def includes_collectives(self) -> bool:
        """As the measured ones say."""
        return self.op_times.includes_collectives

    def __call__(self, query: LayerQuery) -> LayerTimes:
        """Times of one layer; see `OpTimes`."""
        return LayerTimes(*(np.multiply(part, self.factor) for part in self.op_times(query)))


class RememberedTimes:
    """Op times that are looked up once, where the same few are asked for again and again; an `OpTimes`."""

    def __init__(self, op_times: OpTimes) -> None:
        self._op_times = op_times
        # Layers are kept with their times: while one is, no other has its id.
        self._known: dict[tuple[object, ...], tuple[Layer, LayerTimes]] = {}

    @property
    def includes_collectives(self) -> bool:
        """As the others say."""
        return self._op_times.includes_collectives

    def __call__(self, query: LayerQuery) -> LayerTimes:
        """Times of one layer; see `OpTimes`."""
        sizes = query.tensor_parallel_size, query.micro_batch_size, query.start, query.end, query.sequence_parallel_size
        grids = [np.asarray(each, dtype=float) for each in sizes]
        key = (
            id(query.layer),
            query.device,
            query.recompute,
            query.sequence_parallel,
            query.key_value_gradients,
            *((each.shape, each.tobytes()) for each in grids),
        )
        if key not in self._known:
            self._known[key] = query.layer, self._op_times(query)
        return self._known[key][1]
