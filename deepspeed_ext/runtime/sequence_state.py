"""What a stage remembers of a micro-batch from one token slice to the next."""

from collections import defaultdict
from dataclasses import dataclass

from torch import Tensor

from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.attention import KeyValueState, TokenSliceAttention


class SequenceState:
    """State of one live micro-batch on one stage: one `KeyValueState` per layer that attends.

    The engine makes one at a micro-batch's first forward and drops it after its last backward (evaluating, after its
    last forward); nobody else owns one.

    Args:
        token_slices: how the sequence is cut.
    """

    def __init__(self, token_slices: TokenSlices) -> None:
        self.token_slices = token_slices
        self._layers: dict[int, KeyValueState] = defaultdict(lambda: KeyValueState(token_slices.seq_length))

    def past(self, layer: int, token_slice: int) -> "Past":
        """The state as one layer sees it while it computes one token slice."""
        return Past(self.token_slices.prefix_len(token_slice), self._layers[layer])


@dataclass(frozen=True, slots=True)
class Past:
    """What came before a token slice, for one layer. A layer gets it by having an argument named `past`.

    Attributes:
        prefix_len: tokens before this token slice; the position of its first token.
    """

    prefix_len: int
    _state: KeyValueState

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None) -> Tensor:
        """Causal attention of this token slice to itself and to all token slices before it.

        Args:
            query: [B, N, H, D], of the N tokens of this token slice.
            key: [B, N, G, D]; H must be a multiple of G.
            value: [B, N, G, D].
            scale: factor of the scores; 1 / sqrt(D) if None.

        Returns:
            [B, N, H, D].
        """
        return TokenSliceAttention.apply(
            query, key, value, self._state, self.prefix_len, query.shape[-1] ** -0.5 if scale is None else scale
        )
