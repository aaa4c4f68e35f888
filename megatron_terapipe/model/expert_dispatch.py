"""The way of tokens to their experts, on this rank and on others, and back.

P expert-parallel ranks have e = E / P experts each. Letters of other shapes are in `experts.py`.

    alltoall     pairs, sorted by expert --> R of all ranks with my experts --> sort, experts, unsort --> back --> sum
                 counts_E --> counts_Pe: sizes, which the host needs: it waits for the device, in forwards only
    allgather    tokens of all ranks, x_PTh --> my pairs of them --> experts, sum --> y_PTh --> reduce-scatter --> y_Th
                 P / K times the bytes, always of one size: no wait

Sizes are kept for forwards that are computed again. A message is posted, and waited for where its tensors are needed:
the shared experts are computed in between, backward too, since autograd runs the later of two functions first. All
ranks post in the order of the layer, and autograd goes through equal graphs in one order, so all come to the same
exchanges in the same order (ADR 47).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from deepspeed_ext.runtime.state.sequence_state import Past
from deepspeed_ext.runtime.topology import ExpertParallelRanks, Pending, all_gather, reduce_scatter


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of a token and one of its experts, sorted by expert. Choices of other ranks' experts come last."""

    order_R: Tensor
    """Number of each pair among the choices [T, K]."""
    place_TK: Tensor
    """Place of each choice among the pairs: the inverse order."""
    ends_E: Tensor
    """End of the pairs of each expert: int32, on the device."""
    complete: bool
    """Whether each pair has an expert of this rank; known without the values on the device."""

    @classmethod
    def of(cls, chosen_TK: Tensor, num_experts: int, *, complete: bool = False) -> "Pairs":
        """Sort choices by expert, and the choices of one expert by token.

        Args:
            chosen_TK: int64; from `num_experts` on for no expert of this rank.
        """
        expert_R, order_R = chosen_TK.flatten().sort(stable=True)
        place_R = torch.empty_like(order_R)
        place_R[order_R] = torch.arange(len(order_R), device=order_R.device)
        # Not by `bincount`, for whose size the host would wait.
        numbers_E = torch.arange(num_experts, device=expert_R.device)
        ends_E = torch.searchsorted(expert_R, numbers_E, right=True, out_int32=True)
        return cls(order_R, place_R.view_as(chosen_TK), ends_E, complete)

    @property
    def counts_E(self) -> Tensor:
        """Number of the pairs of each expert, int64."""
        return self.ends_E.diff(prepend=self.ends_E.new_zeros(1)).long()

    @property
    def token_R(self) -> Tensor:
        """Token of each pair."""
        return self.order_R // self.place_TK.shape[1]

    def of_experts(self) -> Iterator[slice]:
        """The pairs of each expert; an accelerator's host waits for their numbers."""
        return (slice(start, end) for start, end in pairwise([0, *self.ends_E.tolist()]))


class _Moved(torch.autograd.Function):
    """Tokens copied to their pairs, or pairs summed to their tokens: each is the backward of the other."""

    @staticmethod
    def forward(ctx, tensor, pairs: Pairs, to_pairs: bool):
        ctx.way = pairs, to_pairs
        return tensor[pairs.token_R] if to_pairs else tensor[pairs.place_TK].sum(1)

    @staticmethod
    def backward(ctx, gradient):
        pairs, to_pairs = ctx.way
        return _Moved.apply(gradient, pairs, not to_pairs), None, None


def sorted_values(values_TK: Tensor, pairs: Pairs) -> Tensor:
    """Return values of the choices in the order of the pairs: values_R."""
    return values_TK.flatten().gather(0, pairs.order_R)


def permuted(x_Th: Tensor, pairs: Pairs) -> Tensor:
    """Return a copy of each token for each of its pairs: x_Rh."""
    return _Moved.apply(x_Th, pairs, True)


def unpermuted(y_Rh: Tensor, pairs: Pairs) -> Tensor:
    """Return the sum of the pairs of each token: y_Th."""
    return _Moved.apply(y_Rh, pairs, False)


class Dispatched(NamedTuple):
    """Tokens on their way to their experts."""

    given: Callable[[], tuple[Tensor, Tensor, Pairs]]
    """Waits for the inputs of this rank's experts: x_Rh, weights_R, and their pairs."""
    start_back: Callable[[Tensor], Pending]
    """Starts to send outputs y_Rh back, as the sums of each token's, y_Th."""


@dataclass(frozen=True, slots=True)
class Here:
    """Experts that are all on this rank.

    Args:
        complete: whether all choices are computed; not if there is a capacity.
    """

    num_experts: int
    complete: bool

    def __call__(self, x_Th: Tensor, chosen_TK: Tensor, weights_TK: Tensor, past: Past) -> Dispatched:
        """Give each expert its tokens."""
        pairs = Pairs.of(chosen_TK, self.num_experts, complete=self.complete)
        return Dispatched(
            lambda: (permuted(x_Th, pairs), sorted_values(weights_TK, pairs), pairs),
            lambda y_Rh: lambda: unpermuted(y_Rh, pairs),
        )


# ---------------------------------------------------------------------- messages

Sent = tuple[dist.Work, Tensor]
Send = Callable[[Tensor], Sent]


class _Flight:
    """A tensor that is under way, forward or backward."""

    def __init__(self, send: Send, send_gradient: Send) -> None:
        self.send, self.send_gradient = send, send_gradient
        self._sent: Sent | None = None

    def post(self, send: Send, tensor: Tensor) -> Tensor:
        self._sent = send(tensor.contiguous())
        return self._sent[1]

    def wait(self) -> Tensor:
        assert self._sent is not None, "posted before"
        (work, received), self._sent = self._sent, None
        work.wait()
        return received


class _Post(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, flight: _Flight):
        ctx.flight = flight
        return flight.post(flight.send, tensor)

    @staticmethod
    def backward(ctx, _):
        return ctx.flight.wait(), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, received, flight: _Flight):
        ctx.flight = flight
        flight.wait()
        return received.view_as(received)

    @staticmethod
    def backward(ctx, gradient):
        ctx.flight.post(ctx.flight.send_gradient, gradient)
        # Not read: `_Post` returns the gradient that arrives.
        return gradient, None


def started(tensor: Tensor, send: Send, send_gradient: Send) -> Pending:
    """Post a tensor; call the result to wait for the tensor that arrives."""
    flight = _Flight(send, send_gradient)
    received = _Post.apply(tensor, flight)
    return lambda: _Wait.apply(received, flight)


# ---------------------------------------------------------------------- exact sizes


class _Sizes(NamedTuple):
    """Numbers of pairs in an exchange."""

    counts_Pe: Tensor
    """Pairs from each rank for each expert of this rank."""
    sent: list[int]
    received: list[int]


@dataclass(frozen=True, slots=True)
class AllToAll:
    """Each pair goes to the rank of its expert."""

    num_experts: int
    ranks: ExpertParallelRanks

    def __call__(self, x_Th: Tensor, chosen_TK: Tensor, weights_TK: Tensor, past: Past) -> Dispatched:
        """Start to send tokens."""
        pairs = Pairs.of(chosen_TK, self.num_experts)
        sizes = past.cached_for_recompute("sizes of the exchange", lambda: self._sizes(pairs))
        there, back = self._send(sizes.sent, sizes.received), self._send(sizes.received, sizes.sent)
        # Pairs of no expert are the last, and stay here.
        num_sent = sum(sizes.sent)
        x_Rh, weights_R = (
            started(each[:num_sent], there, back) for each in (permuted(x_Th, pairs), sorted_values(weights_TK, pairs))
        )
        # Pairs arrive by rank and expert.
        counts_Pe = sizes.counts_Pe
        expert_Pe = torch.arange(counts_Pe.shape[1], device=counts_Pe.device).expand_as(counts_Pe)
        expert_R = expert_Pe.flatten().repeat_interleave(counts_Pe.flatten(), output_size=sum(sizes.received))
        here = Pairs.of(expert_R.unsqueeze(1), counts_Pe.shape[1], complete=True)

        def start_back(y_Rh: Tensor) -> Pending:
            arriving, left = started(unpermuted(y_Rh, here), back, there), len(pairs.order_R) - num_sent
            return lambda: unpermuted(F.pad(arriving(), (0, 0, 0, left)) if left else arriving(), pairs)

        return Dispatched(lambda: (permuted(x_Rh(), here), sorted_values(weights_R(), here), here), start_back)

    def _sizes(self, pairs: Pairs) -> _Sizes:
        """Exchange counts, and wait until the host has the sizes."""
        sent_Pe = pairs.counts_E.view(self.ranks.size, -1)
        counts_Pe = torch.empty_like(sent_Pe)
        dist.all_to_all_single(counts_Pe, sent_Pe, group=self.ranks.group)
        sent, received = torch.stack([sent_Pe.sum(1), counts_Pe.sum(1)]).tolist()
        return _Sizes(counts_Pe, sent, received)

    def _send(self, sent: list[int], received: list[int]) -> Send:
        def send(tensor: Tensor) -> Sent:
            arriving = tensor.new_empty((sum(received), *tensor.shape[1:]))
            work = dist.all_to_all_single(arriving, tensor, received, sent, group=self.ranks.group, async_op=True)
            return work, arriving

        return send


# ---------------------------------------------------------------------- one size


@dataclass(frozen=True, slots=True)
class AllGather:
    """All tokens go to all ranks, which have as many tokens each."""

    num_experts: int
    ranks: ExpertParallelRanks

    def __call__(self, x_Th: Tensor, chosen_TK: Tensor, weights_TK: Tensor, past: Past) -> Dispatched:
        """Start to send tokens."""
        x_PTh, weights_PTK = (started(each, self._gather, self._reduce_scatter) for each in (x_Th, weights_TK))
        work, chosen_PTK = self._gather(chosen_TK.int())
        work.wait()
        own = self.num_experts // self.ranks.size
        here_PTK = chosen_PTK.long() - self.ranks.rank * own
        is_here_PTK = (here_PTK >= 0) & (here_PTK < own)
        pairs = Pairs.of(here_PTK.where(is_here_PTK, own), own)
        return Dispatched(
            lambda: (permuted(x_PTh(), pairs), sorted_values(weights_PTK() * is_here_PTK, pairs), pairs),
            lambda y_Rh: started(unpermuted(y_Rh, pairs), self._reduce_scatter, self._gather),
        )

    def _gather(self, tensor: Tensor) -> Sent:
        gathered = tensor.new_empty((self.ranks.size * len(tensor), *tensor.shape[1:]))
        return all_gather(gathered, tensor, group=self.ranks.group, async_op=True), gathered

    def _reduce_scatter(self, tensor: Tensor) -> Sent:
        own = tensor.new_empty((len(tensor) // self.ranks.size, *tensor.shape[1:]))
        return reduce_scatter(own, tensor, group=self.ranks.group, async_op=True), own
