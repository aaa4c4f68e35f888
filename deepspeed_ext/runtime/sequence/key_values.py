"""Keys and values of one layer between the token slices of a sequence, and the gradients that these have for them.

    layer                       keys and values                                      gradients
    whole sequence              one buffer; reading gives views                      of all tokens before the last
                                                                                     token slice that ran backward
    window, in training;        a copy of each token slice's, freed by its own       of the tokens before it, or of the
    copied to the host          backward, which is the last to read them; reading    W - 1 before it
                                puts the keys in reach together
    window, forward alone       those in reach of the token slice; the others are    none
                                freed as the next one writes

A window of W tokens shows a token itself and W - 1 before it, so a token slice reaches W - 1 tokens back. Gradients are
in `key_value_gradients`, those of each token slice apart.
"""

from typing import Protocol

import torch
from torch import Tensor

from deepspeed_ext.runtime.attention_kernels import Gradients
from deepspeed_ext.runtime.sequence.key_value_gradients import PendingGradients


class KeyValueState(Protocol):
    """Keys and values of one layer for one micro-batch, and the gradients that token slices have for earlier ones."""

    def write(self, key: Tensor, value: Tensor, start: int) -> None:
        """Store the keys and values of the tokens start .. start + N.

        Args:
            key: [B, N, G, D].
            value: [B, N, G, D].
            start: number of the first token in the sequence.
        """

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, E, G, D] that a token slice attends to: the last E tokens up to its end.

        Args:
            start: first token of the token slice.
            end: token behind its last one.
        """

    def accumulate(self, gradients: Gradients, start: int) -> tuple[Tensor, Tensor]:
        """Keep the gradients of a token slice for those before it, and return the complete gradients of its own.

        Returns:
            Gradients [B, N, G, D] of the token slice's own keys and values.
        """


def key_value_state(
    seq_length: int,
    window: int | None,
    *,
    forward_only: bool,
    apart: bool = False,
    gradients_in: torch.dtype | None = None,
) -> KeyValueState:
    """Return the state of a layer that nothing has been written to.

    Args:
        window: tokens that a token attends to, itself included; None for all before it.
        forward_only: whether no backward will follow.
        apart: whether those of token slices are kept apart in training, as copies to the host need them.
        gradients_in: type in which gradients are kept; None for fp32 or wider.
    """
    if forward_only:
        return KeysOfSequence(seq_length) if window is None else KeysInReach(window)
    if window is None and not apart:
        return KeysOfSequence(seq_length, gradients_in)
    return KeysOfTokenSlices(window, gradients_in)


class KeysOfSequence:
    """Keys and values of a whole sequence, in one buffer that later token slices write on.

    Args:
        gradients_in: type in which gradients are kept; None for fp32 or wider.
    """

    def __init__(self, seq_length: int, gradients_in: torch.dtype | None = None) -> None:
        self.seq_length = seq_length
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._pending = PendingGradients(gradients_in)

    def write(self, key: Tensor, value: Tensor, start: int) -> None:
        """Store keys and values. Writing the same tokens again changes nothing, so recomputing a forward is safe.

        Args:
            key: [B, N, G, D].
            value: [B, N, G, D].
            start: number of the first token in the sequence.
        """
        if self._keys is None or self._values is None:
            shape = (key.shape[0], self.seq_length, *key.shape[2:])
            self._keys, self._values = key.new_empty(shape), value.new_empty(shape)
        end = start + key.shape[1]
        self._keys[:, start:end] = key
        self._values[:, start:end] = value
        self._pending.written(start, end)

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the tokens 0 .. end, each [B, end, G, D]: views, never copies.

        Args:
            start: first token of the token slice.
            end: token behind its last one.
        """
        assert self._keys is not None and self._values is not None, "read before any write"
        return self._keys[:, :end], self._values[:, :end]

    def accumulate(self, gradients: Gradients, start: int) -> tuple[Tensor, Tensor]:
        """Add up gradients, as in `KeyValueState`."""
        return self._pending.accumulate(gradients, start)


class KeysOfTokenSlices:
    """Keys and values in training, those of each token slice apart: for a sliding window, or to be copied to the host.

    Args:
        window: tokens that a token attends to, itself included; None for all before it.
        gradients_in: type in which gradients are kept; None for fp32 or wider.
    """

    def __init__(self, window: int | None, gradients_in: torch.dtype | None = None) -> None:
        self.window = window
        self._of_token_slices: dict[int, tuple[Tensor, Tensor]] = {}
        self._pending = PendingGradients(gradients_in)

    def write(self, key: Tensor, value: Tensor, start: int) -> None:
        """Store copies of keys and values; what was written of the same tokens before is let go of.

        Args:
            key: [B, N, G, D].
            value: [B, N, G, D].
            start: number of the first token in the sequence.
        """
        # Copied, since they are parts of a product that would stay with them.
        copies = (each.clone(memory_format=torch.contiguous_format) for each in (key, value))
        self._of_token_slices[start] = next(copies), next(copies)
        self._pending.written(start, start + key.shape[1])

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, E, G, D] in reach, put together from the token slices where there are several.

        Args:
            start: first token of the token slice.
            end: token behind its last one.
        """
        first = 0 if self.window is None else max(0, start + 1 - self.window)
        reached = [
            tuple(each[:, max(0, first - begin) :] for each in kept)
            for begin, kept in sorted(self._of_token_slices.items())
            if begin < end and first < begin + kept[0].shape[1]
        ]
        assert sum(key.shape[1] for key, _ in reached) == end - first, "keys in reach are not there"
        if len(reached) == 1:
            return reached[0]
        keys, values = (torch.cat(parts, dim=1) for parts in zip(*reached, strict=True))
        return keys, values

    def accumulate(self, gradients: Gradients, start: int) -> tuple[Tensor, Tensor]:
        """Add up gradients, as in `KeyValueState`, and free the keys of the token slice, which no later op reads."""
        complete = self._pending.accumulate(gradients, start)
        del self._of_token_slices[start]
        return complete

    def of_token_slice(self, start: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, N, G, D] of a token slice.

        Args:
            start: first token of the token slice.
        """
        return self._of_token_slices[start]

    def drop(self, start: int) -> None:
        """Let go of keys and values of a token slice, until they are put back.

        Args:
            start: first token of the token slice.
        """
        del self._of_token_slices[start]

    def put_back(self, start: int, key: Tensor, value: Tensor) -> None:
        """Have keys and values of a token slice again.

        Args:
            start: first token of the token slice.
            key: [B, N, G, D].
            value: [B, N, G, D].
        """
        self._of_token_slices[start] = key, value


class KeysInReach:
    """Keys and values for a sliding window where no backward follows: those that the last token slice reached."""

    def __init__(self, window: int) -> None:
        self.window = window
        self._reached: tuple[Tensor, Tensor] | None = None
        self._end = 0

    def write(self, key: Tensor, value: Tensor, start: int) -> None:
        """Store keys and values, and free those before that are out of reach.

        Args:
            key: [B, N, G, D].
            value: [B, N, G, D].
            start: number of the first token in the sequence.
        """
        assert start == self._end, "token slices must run forward first to last, each once"
        before = (key[:, :0], value[:, :0]) if self._reached is None else self._reached
        kept = min(start, self.window - 1)
        keys, values = (
            torch.cat((old[:, old.shape[1] - kept :], new), dim=1)
            for old, new in zip(before, (key, value), strict=True)
        )
        self._reached, self._end = (keys, values), start + key.shape[1]

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, E, G, D] of the token slice that was written last, and of those in its reach.

        Args:
            start: first token of the token slice.
            end: token behind its last one.
        """
        assert self._reached is not None and end == self._end, "read of another token slice than the last"
        assert self._reached[0].shape[1] == end - max(0, start + 1 - self.window), "keys in reach are not there"
        return self._reached

    def accumulate(self, gradients: Gradients, start: int) -> tuple[Tensor, Tensor]:
        """Refuse a backward: keys [B, E, G, D] that it would have read are gone.

        Raises:
            AssertionError: always.
        """
        raise AssertionError(f"a backward at token {start} of a sequence that was to run forward alone")
