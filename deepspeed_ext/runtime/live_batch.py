"""A batch on one rank: its plan, which is known before it runs, and its state between forwards and backwards."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.ops import Op, PipelineShape
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.attention.documents import Documents
from deepspeed_ext.runtime.gradients.weight_gradients import Product
from deepspeed_ext.runtime.micro_batch import TokenSliceBatch, join_micro_batches, join_token_slices
from deepspeed_ext.runtime.recomputation import RandomState
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

    def add_loss(self, micro_batch: int, loss: Tensor) -> None:
        """Add a token slice's share [] to the loss of its micro-batch."""
        earlier = self.losses.get(micro_batch)
        self.losses[micro_batch] = loss.detach() if earlier is None else earlier + loss.detach()

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

    def forget_data(self, micro_batch: int) -> None:
        """Free the data of a micro-batch after its last op on this rank."""
        self.parts.pop(micro_batch, None)
        self.documents.pop(micro_batch, None)

    def clear(self) -> None:
        """Free all tensors, but keep the cuts."""
        for held in (self.parts, self.documents, self.states, self.buffers, self.passed, self.losses):
            held.clear()
        self.outputs.clear()
        self.labels.clear()
