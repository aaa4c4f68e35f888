"""Gradients for the keys and values of one layer, between the backwards of the token slices of a sequence.

    token slice          0        1        2        3
    backward of 3     [ += 3 | += 3 | += 3 ]              a buffer for each token slice before it
    backward of 2     [ += 2 | += 2 ]                     its own = what is pending for it + what it finds; freed
    backward of 1     [ += 1 ]
    backward of 0

Each token slice has buffers of its own, from the first backward that finds gradients for it to its own backward, which
frees them. Sums are computed in fp32, or in the wider type of the model; `kept_in` may round what is stored between
two backwards (ADR 49).
"""

import torch
from torch import Tensor

from deepspeed_ext.runtime.attention_kernels import Gradients


class PendingGradients:
    """Gradients that token slices which ran backward have for the keys and values of earlier ones.

    Args:
        kept_in: type in which they are kept; None for fp32, or the wider type of the model.
    """

    def __init__(self, kept_in: torch.dtype | None = None) -> None:
        self._kept_in = kept_in
        self._ends: dict[int, int] = {}  # of token slices that were written and have not run backward, by their starts
        self._began = False
        # By the start of a token slice: the first of its tokens that has gradients, and those [B, E, G, D] of its
        # keys and values from there on; gradients of the tokens before are 0.
        self._pending: dict[int, tuple[int, tuple[Tensor, Tensor]]] = {}

    def written(self, start: int, end: int) -> None:
        """Note that keys and values of a token slice are there.

        Args:
            end: token behind the last one.
        """
        if not self._began:
            self._ends[start] = end

    def accumulate(self, gradients: Gradients, start: int) -> tuple[Tensor, Tensor]:
        """Keep the gradients of a token slice for those before it, and return the complete gradients of its own.

        Returns:
            Gradients [B, N, G, D] of the token slice's own keys and values.
        """
        self._began = True
        assert start == max(self._ends), "token slices must run backward last to first"
        del self._ends[start]
        if start in self._pending:
            due, found = self._pending.pop(start)
            for own, later in zip(gradients.own, found, strict=True):
                # In place, since nobody else holds it; the sum is rounded once, from fp32.
                own[:, due - start :].add_(later)
        reached = start - gradients.prefix[0].shape[1]
        for begin, end in self._ends.items():
            if end > reached:
                first = max(begin, reached)
                key, value = (each[:, first - reached : end - reached] for each in gradients.prefix)
                self._pending[begin] = self._sums(begin, first, (key, value))
        return gradients.own

    def _sums(self, begin: int, first: int, found: tuple[Tensor, Tensor]) -> tuple[int, tuple[Tensor, Tensor]]:
        """What is pending for the token slice from `begin`, and what was found from its token `first` on."""
        known_first, known = self._pending.get(begin, (0, None))
        if known is not None and first >= known_first:
            for total, each in zip(known, found, strict=True):
                total[:, first - known_first :].add_(each)
            return known_first, known
        key, value = (self._copy(each) for each in found)
        if known is not None:
            for total, each in zip((key, value), known, strict=True):
                total[:, known_first - first :].add_(each)
        return first, (key, value)

    def _copy(self, gradient: Tensor) -> Tensor:
        dtype = self._kept_in or torch.promote_types(gradient.dtype, torch.float32)
        return torch.empty(gradient.shape, dtype=dtype, device=gradient.device).copy_(gradient)
