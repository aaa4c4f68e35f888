"""A batch on one rank: its plan, its state between forwards and backwards, its loss; whether it may load kernels."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.autograd.graph import GradientEdge

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.ops import Op, PipelineShape
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.attention.documents import Documents
from deepspeed_ext.runtime.gradients.weight_gradients import Product
from deepspeed_ext.runtime.micro_batch import TokenSliceBatch, join_micro_batches, join_token_slices, to_device
from deepspeed_ext.runtime.state.sequence_state import SequenceState
from deepspeed_ext.runtime.topology import SequenceParallelRanks

CutByDocuments = Callable[[Documents], TokenSlices]
"""Lengths of the token slices of a micro-batch, given only its documents, so that all ranks cut alike."""

SEQUENCES_PER_STEP = 1 << 32
"""Above the number of any step, so that every sequence of a run has a number of its own."""


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Facts of a batch that are known before it runs."""

    shape: PipelineShape
    token_slices: TokenSlices
    """Lengths of the token slices; of micro-batches that are cut by their documents, their number and their sum."""
    ranks: SequenceParallelRanks = field(default_factory=SequenceParallelRanks)
    """Ranks that share each token slice."""
    by_documents: CutByDocuments | None = None
    """Gives the lengths of a micro-batch; None if all have `token_slices`."""
    rows: int
    """Rows of a micro-batch."""
    step: int = 0
    """Steps that precede it."""
    replica: int = 0
    num_replicas: int = 1
    training: bool
    """Whether a backward follows."""
    updates: bool = False
    """Whether gradients are summed over replicas, and the optimizer steps."""
    computes_loss: bool = True
    """Whether to call the loss function."""
    keeps_outputs: bool = False
    """Whether to keep the last layer's outputs, and the labels."""

    def sequences(self, micro_batch: int) -> range:
        """Numbers of the rows of a micro-batch among all sequences of the run, for dropout."""
        before = micro_batch * self.num_replicas + self.replica
        first = self.step * SEQUENCES_PER_STEP + before * self.rows
        return range(first, first + self.rows)

    @property
    def extent(self) -> tuple[bool | int | PipelineShape, ...]:
        """All that determines the kernels of the batch, but for the lengths of its token slices."""
        return self.shape, self.rows, self.training, self.computes_loss, self.keeps_outputs


@dataclass(frozen=True)
class RandomState:
    """State of torch's generators of random numbers, on the host and on the device of the layers."""

    device: torch.device
    of_host: Tensor
    of_device: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> "RandomState":
        """The state before the layers of a device draw."""
        of_device = None if device.type == "cpu" else get_accelerator().get_rng_state(device.index)
        return cls(device, torch.get_rng_state(), of_device)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Draw the same numbers again inside; afterwards the generators continue from their earlier states."""
        on_host = self.of_device is None
        forked = {"devices": []} if on_host else {"devices": [self.device], "device_type": self.device.type}
        with torch.random.fork_rng(**forked):
            torch.set_rng_state(self.of_host)
            if self.of_device is not None:
                get_accelerator().set_rng_state(self.of_device, self.device.index)
            yield


@dataclass(slots=True)
class Buffer:
    """Tensors of one live token slice of a stage."""

    inputs: tuple[Tensor, ...] = ()
    """Inputs from the previous stage, until their gradients are taken; empty on the first stage."""
    given: tuple[Any, Mapping[str, Any]] = (None, MappingProxyType({}))
    """Input of the first layer, and entries of the data that layers take by name, from their arrival to the forward."""
    outputs: tuple[Tensor, ...] = ()
    """Outputs for the next stage, until they are sent or passed on."""
    gradients: tuple[Tensor, ...] = ()
    """Gradients of the outputs that need one, from their arrival to the backward."""
    roots: tuple[Tensor | GradientEdge, ...] = ()
    """Starts of the backward: the loss on the last stage, else the outputs that need gradients, as edges of the graph,
    so that the tensors can be freed once they are sent."""
    random_state: RandomState | None = None
    """Random state of a stage that is computed again, if it keeps it."""
    bear_gradients: tuple[bool, ...] = ()
    """Of a stage that is computed again, for each output whether its gradient is received."""
    deferred_wgrads: list[Product] = field(default_factory=list)
    """Products of weights that the backward deferred, first to last."""

    def take_gradients(self) -> tuple[Tensor, ...]:
        """Gradients of the inputs [...]. Both leave the buffer, since weight gradients may be computed much later."""
        inputs, self.inputs = self.inputs, ()
        return tuple(
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for tensor in inputs
            if tensor.requires_grad
        )


class LiveBatch:
    """The state of a batch on one rank: the cuts of its micro-batches, and all tensors while it runs."""

    def __init__(self, plan: BatchPlan) -> None:
        self.plan = plan
        self._own_parts = plan.ranks.parts(plan.token_slices)
        self._cuts: dict[int, tuple[TokenSlices, TokenSlices]] = {}
        self.may_load = False
        """Whether a rank may load kernels in it."""
        self.parts: dict[int, list[TokenSliceBatch]] = {}
        """By micro-batch, the data of its token slices; on the ranks that cut."""
        self.documents: dict[int, Documents] = {}
        """By micro-batch, starts of its documents, if the module reads them."""
        self.states: dict[tuple[int, int], SequenceState] = {}
        """By stage and micro-batch, state between token slices."""
        self.buffers: dict[int, Buffer] = defaultdict(Buffer)
        """By number in the program."""
        self.passed: dict[Op, tuple[Tensor, ...]] = {}
        """Results that one stage of this rank passed to another, by the op that reads them."""
        self.losses: dict[int, Tensor] = {}
        """By micro-batch, the sum [] of the weighted losses of its token slices; on ranks with the last stage."""
        self.outputs: dict[int, dict[int, Any]] = defaultdict(dict)
        """By micro-batch and token slice, the last layer's outputs, if they are kept."""
        self.labels: dict[int, dict[int, Any]] = defaultdict(dict)
        """By micro-batch and token slice, the labels, if they are kept."""

    def cut(self, micro_batch: int, documents: Documents | None) -> None:
        """Cut a micro-batch by its documents, before any other use; None if the module does not read them."""
        by_documents, like = self.plan.by_documents, self.plan.token_slices
        if documents is None or by_documents is None or micro_batch in self._cuts:
            return
        cut = by_documents(documents)
        if len(cut) != len(like) or cut.seq_length != like.seq_length:
            raise UserError(
                f"cut_by_documents gave {len(cut)} token slices of {cut.seq_length} tokens ({cut}), and the module has "
                f"{len(like)} of {like.seq_length}: give as many"
            )
        self._cuts[micro_batch] = cut, self.plan.ranks.parts(cut)

    def lengths(self) -> set[tuple[str, int]]:
        """Lengths of the token slices and of the keys that they attend to, with the name of their kind."""
        cuts = [cut.lengths for cut, _ in self._cuts.values()] or [self.plan.token_slices.lengths]
        return {
            pair for cut in cuts for pair in (*(("tokens", n) for n in cut), *(("keys", n) for n in accumulate(cut)))
        }

    def token_slices_of(self, micro_batch: int) -> TokenSlices:
        """Return the lengths of the token slices of a micro-batch."""
        return self._cuts.get(micro_batch, (self.plan.token_slices,))[0]

    def parts_of(self, micro_batch: int) -> TokenSlices:
        """Return the lengths of this rank's parts of its token slices."""
        return self._cuts[micro_batch][1] if micro_batch in self._cuts else self._own_parts

    def outputs_by_micro_batch(self) -> list[Any]:
        """Outputs of each micro-batch, joined over its token slices. All ranks that share these must call it."""
        return self._joined(self.outputs)

    def outputs_and_labels(self) -> tuple[Any, Any]:
        """Outputs and labels of the whole batch; None without the last stage. All ranks as above must call it."""
        if not self.outputs:
            return None, None
        labels = self._joined(self.labels, read_by_all=True)
        return join_micro_batches(self.outputs_by_micro_batch()), join_micro_batches(labels)

    def _joined(self, kept: Mapping[int, Mapping[int, Any]], *, read_by_all: bool = False) -> list[Any]:
        """By micro-batch, its token slices joined in their order."""
        return [
            join_token_slices(
                [of_one[number] for number in sorted(of_one)],
                self.token_slices_of(micro_batch),
                self.plan.ranks,
                read_by_all=read_by_all,
            )
            for micro_batch, of_one in sorted(kept.items())
        ]

    def clear(self) -> None:
        """Free all tensors, but keep the cuts."""
        for held in (self.parts, self.documents, self.states, self.buffers, self.passed, self.losses):
            held.clear()
        self.outputs.clear()
        self.labels.clear()


LENGTHS_OF_A_RANGE = 8
"""Lengths of a range after which its others count as run: compilers generalise after two."""


class RunLengths:
    """The lengths for which an accelerator has run all ops of a batch, so that it has loaded their kernels (ADR 22).

    Which lengths load one depends on compilers and libraries, so each new length counts, the same on all ranks.
    """

    def __init__(self) -> None:
        self.settles = not get_accelerator().is_synchronized_device()
        """Whether no message travels under the ops of a batch with new lengths."""
        self._run: defaultdict[Hashable, set[int]] = defaultdict(set)

    def are_new(self, batch: LiveBatch) -> bool:
        """Whether a batch may load kernels."""
        found = ((tokens, self._run[key]) for key, tokens in self._lengths(batch))
        return any(tokens not in run and len(run) < LENGTHS_OF_A_RANGE for tokens, run in found)

    def add(self, batch: LiveBatch) -> None:
        """Add the lengths of a batch that has run."""
        for key, tokens in self._lengths(batch):
            if len(self._run[key]) < LENGTHS_OF_A_RANGE:
                self._run[key].add(tokens)

    def _lengths(self, batch: LiveBatch) -> Iterator[tuple[Hashable, int]]:
        """Lengths of token slices and of their keys, each with its range: up to a power of 2, whole tiles or not."""
        for content, tokens in batch.lengths() if self.settles else ():
            yield (batch.plan.extent, content, tokens.bit_length(), tokens % 128 == 0), tokens


CountLossTokens = Callable[[Any], float]
"""Number of tokens with loss in a micro-batch of the data iterator."""


class BatchLoss:
    """The loss of an engine's batches, on one rank: summed over token slices, micro-batches and ranks.

    It is the mean over micro-batches and replicas. Where the module counts tokens (`loss_tokens`), it is the mean over
    all tokens of the batch with loss, on all replicas: micro-batch m with n_m of the N tokens has the weight n_m / N,
    where the plain mean has 1 / (micro-batches x replicas) for each. N is needed before the first loss, because a
    backward may follow at once. So the ranks that compute it read the micro-batches of a batch ahead. To divide the
    gradients by N after the last op, as Megatron-LM does, is too late for reductions that already run.

    Losses and gradients are averaged over all ranks with the same weights, including the R sequence-parallel ranks of
    each replica. These compute parts of one loss, so each part counts R times.

    Args:
        like: a tensor of the type and device of the loss.
        shape: of the loss: [], or [K] for several that are reported apart.
        last_rank: pipeline rank of the last stage.
    """

    def __init__(
        self, like: Tensor, shape: tuple[int, ...], grid: Any, last_rank: int, sequence_ranks: SequenceParallelRanks
    ) -> None:
        self._like, self._shape, self._sequence_ranks = like, shape, sequence_ranks
        self._copies = grid.get_data_parallel_group()
        """Ranks with the same weights: the sequence-parallel ranks of all replicas."""
        self._pipeline = grid.get_pipe_parallel_group() if grid.pipe_parallel_size > 1 else None
        self._source = grid.stage_to_global(last_rank)
        self._computes = grid.stage_id == last_rank
        """Whether this rank has the last stage."""
        self.begin()

    def begin(self) -> None:
        """Start a batch, in which all micro-batches weigh the same."""
        self._weights: Tensor | None = None
        self._num_tokens: Tensor | None = None

    def weigh_by_tokens(self, counts: Sequence[float]) -> None:
        """Weigh this rank's micro-batches by their tokens with loss; called on all ranks with the last stage."""
        numbers = to_device(torch.tensor([sum(counts), *counts], dtype=torch.float64), self._like.device)
        num_tokens = numbers[0]
        dist.all_reduce(num_tokens, group=self._copies)
        num_tokens /= self._sequence_ranks.size  # each of them counts whole micro-batches
        # Before the mean over micro-batches and ranks.
        shares = numbers[1:] / num_tokens.clamp(min=1)
        self._weights = shares * (len(counts) * dist.get_world_size(self._copies))
        self._num_tokens = num_tokens

    def weigh(self, loss: Tensor, micro_batch: int) -> Tensor:
        """A token slice's share [] of its micro-batch's loss, times the weight of the micro-batch."""
        if self._weights is not None:
            return loss * self._weights[micro_batch].to(loss.dtype)
        return loss if self._sequence_ranks.size == 1 else loss * self._sequence_ranks.size

    def of_micro_batch(self, loss: Tensor) -> Tensor:
        """The loss [] of a whole micro-batch on this replica, given this rank's weighed share [].

        All ranks that share the sequences must call it.
        """
        if self._sequence_ranks.size > 1:
            loss = loss / self._sequence_ranks.size
            dist.all_reduce(loss, group=self._sequence_ranks.group)
        return loss

    def num_tokens(self) -> float:
        """Number of tokens with loss in the last batch, on every rank; every rank must call this."""
        counted = torch.zeros((), dtype=torch.float64, device=self._like.device)
        return self._broadcast(counted if self._num_tokens is None else self._num_tokens).item()

    def mean(self, loss: Tensor | None, *, broadcast: bool = True) -> Tensor | None:
        """The mean over replicas of the mean over micro-batches; without `broadcast`, on the last stage only.

        Args:
            loss: mean over the micro-batches of this rank, of the shape of the loss; None without the last stage.
        """
        if loss is None:
            loss = torch.zeros(self._shape, dtype=self._like.dtype, device=self._like.device)
        loss = loss.detach().to(torch.promote_types(loss.dtype, torch.float32))
        if self._computes:
            dist.all_reduce(loss, group=self._copies)
            loss /= dist.get_world_size(self._copies)
        if not broadcast:
            return loss if self._computes else None
        return self._broadcast(loss)

    def _broadcast(self, value: Tensor) -> Tensor:
        """Send a scalar of the last stage to every rank."""
        if self._pipeline is not None:
            dist.broadcast(value, src=self._source, group=self._pipeline)
        return value
