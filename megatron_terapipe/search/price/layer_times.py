"""The interface of op times: their sources are a roofline or measured profiles, their users the cost models."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.devices import Device
from megatron_terapipe.search.price.workload import Attention, Experts, Layer
from megatron_terapipe.strategy import USUAL_KEYS, KeptKeys

Numbers = NDArray[np.float64]
ScalarOrArray = Numbers | float
"""A number, or an array of them; arguments of one call broadcast against each other."""


class LayerTimes(NamedTuple):
    """Seconds of the ops of one layer for one token slice of one micro-batch on one tensor-parallel rank."""

    forward: ScalarOrArray
    input_gradient: ScalarOrArray
    """BI; with recomputation it includes the forward that runs again."""
    weight_gradient: ScalarOrArray
    launch_forward: ScalarOrArray = 0.0
    """Time that the host needs to launch F; it is hidden where the device needs longer. 0 where the times are measured
    ones, which have it in them."""
    launch_input_gradient: ScalarOrArray = 0.0
    launch_weight_gradient: ScalarOrArray = 0.0
    shared_experts: ScalarOrArray = 0.0
    """Part of `forward` in shared experts."""
    attention: ScalarOrArray = 0.0
    """Part of `forward` in the attention core."""


@dataclass(frozen=True, eq=False, kw_only=True)
class OpSizes:
    """Sizes that op times depend on, in addition to layer and device; the arrays broadcast against each other.

    Token slices have their bounds as shares of the sequence; of a `LayerQuery`, in tokens of the layer.
    """

    tensor_parallel_size: ScalarOrArray
    micro_batch_size: ScalarOrArray
    start: ScalarOrArray
    end: ScalarOrArray
    sequence_parallel_size: ScalarOrArray = 1.0
    """Ranks that share the tokens of its matrices, and the heads of its attention."""
    expert_parallel_size: ScalarOrArray = 1.0
    """Ranks that share its experts."""
    recompute: str | NDArray[np.str_] = "none"
    """As `Strategy.recompute` has it."""
    sequence_parallel: bool = False
    """Whether tensor-parallel ranks share the tokens between the matrices, too."""
    kept_keys: KeptKeys = USUAL_KEYS
    """Form of keys, values and their gradients between two token slices."""


@dataclass(frozen=True, eq=False)
class LayerQuery(OpSizes):
    """One layer on a device, with the sizes that the times of its ops depend on."""

    layer: Layer
    device: Device

    def again(self, recompute: str) -> ScalarOrArray:
        """Return 1 where its backward runs a part of the layer again, else 0: [...].

        Args:
            recompute: the part, by the names of `Strategy.recompute`.
        """
        if recompute != "stage" and (not self.layer.is_block or (recompute == "full" and not self.layer.recomputed)):
            return 0.0
        return np.where(np.equal(self.recompute, recompute), 1.0, 0.0)

    @property
    def sequences(self) -> ScalarOrArray:
        """Sequences [...] that are as much work as one rank's part of the micro-batch.

        A matrix has as many rows, whether sequence-parallel ranks share the tokens or the sequences; and attention
        computes as much for a part of the heads of all sequences as for all heads of a part of the sequences.
        """
        return self.micro_batch_size / self.sequence_parallel_size

    @property
    def rows(self) -> ScalarOrArray:
        """Rows [...] of the layer's matrices: tokens of the token slice on one rank, of all sequences."""
        return self.sequences * (self.end - self.start)

    @property
    def routed_tokens(self) -> ScalarOrArray:
        """Tokens [...] that the router of one rank reads."""
        return self.rows / (self.tensor_parallel_size if self.sequence_parallel else 1.0)

    def expert_rows(self, experts: Experts) -> ScalarOrArray:
        """Rows [...] that the experts of the rank with most compute."""
        return (
            self.routed_tokens
            * experts.chosen
            * np.where(np.greater(self.expert_parallel_size, 1), experts.imbalance, 1.0)
        )


def held_rows(experts: Experts, ranks: ScalarOrArray) -> ScalarOrArray:
    """Rows [...] that an expert-parallel rank holds for each choice of its tokens: of the rank with most, or of all."""
    return np.where(np.greater(ranks, 1), ranks if experts.sends_to_all else experts.imbalance, 1.0)


def key_heads(attention: Attention, ranks: ScalarOrArray) -> ScalarOrArray:
    """Heads of key and value [...] that ranks hold together: more than there are, where more ranks share the heads."""
    return np.maximum(attention.key_value_heads, ranks)


class OpTimes(Protocol):
    """Times of the ops of a layer, wherever they come from."""

    def __call__(self, query: LayerQuery) -> LayerTimes:
        """Return the seconds of the ops of one layer; arrays have the shape that the query broadcasts to."""
        ...


@dataclass(frozen=True)
class ScaledTimes:
    """Op times of which every one takes longer by the same factor; an `OpTimes`."""

    op_times: OpTimes
    factor: float

    def __call__(self, query: LayerQuery) -> LayerTimes:
        """Times of one layer; see `OpTimes`."""
        return LayerTimes(*(np.multiply(part, self.factor) for part in self.op_times(query)))


class RememberedTimes:
    """A cache of op times; an `OpTimes`."""

    def __init__(self, op_times: OpTimes) -> None:
        self._op_times = op_times
        self._known: dict[tuple[object, ...], LayerTimes] = {}

    def __call__(self, query: LayerQuery) -> LayerTimes:
        """Times of one layer; see `OpTimes`."""
        values = vars(query).values()
        key = tuple((each.shape, each.tobytes()) if isinstance(each, np.ndarray) else each for each in values)
        if key not in self._known:
            self._known[key] = self._op_times(query)
        return self._known[key]
