"""State of the batch in progress on a rank: micro-batches, their sequence states, buffers, losses."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from deepspeed_ext.plan.ops import Op
from deepspeed_ext.runtime.batches.batch import TokenSliceBatch, join_micro_batches, join_token_slices
from deepspeed_ext.runtime.batches.cuts import Cuts
from deepspeed_ext.runtime.gradients.weight_gradients import Product
from deepspeed_ext.runtime.recomputation import RandomState
from deepspeed_ext.runtime.sequence.documents import Documents
from deepspeed_ext.runtime.sequence.sequence_state import SequenceState


@dataclass(slots=True)
class Buffer:
    """Tensors of one live token slice of a stage."""

    inputs: tuple[Tensor, ...] = ()
    """Inputs from the previous stage, until their gradients are taken; empty on the first stage."""
    outputs: tuple[Tensor, ...] = ()
    """Outputs for the next stage, until they are sent or passed on."""
    roots: tuple[Tensor | GradientEdge, ...] = ()
    """Starts of the backward: the loss on the last stage, else the outputs that need gradients, as edges of the graph,
    so that the tensors themselves can go once they are sent."""
    random_state: RandomState | None = None
    """What a stage that is computed again drew its random numbers from, if it keeps that."""
    bear_gradients: tuple[bool, ...] = ()
    """Of a stage that is computed again, for each output whether its gradient comes back."""
    deferred_wgrads: list[Product] = field(default_factory=list)
    """Products of weights that the backward deferred, first to last."""

    def take_gradients(self) -> tuple[Tensor, ...]:
        """Gradients of the inputs [...]. Both leave the buffer, since weight gradients may come much later."""
        inputs, self.inputs = self.inputs, ()
        return tuple(
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for tensor in inputs
            if tensor.requires_grad
        )


class LiveBatch:
    """State of a batch on one rank.

    Attributes:
        parts: per micro-batch, what its token slices read; on the ranks that load.
        documents: per micro-batch, where its documents begin, when the module asks.
        states: per stage and micro-batch, what token slices leave to others.
        buffers: buffers by their number in the program.
        passed: results that one stage of this rank passed to another, by the op that reads them.
        losses: per micro-batch, the weighted losses of its token slices so far; where the last stage is.
        outputs: per micro-batch and token slice, the last layer's outputs, where they are asked for.
        labels: per micro-batch and token slice, the labels, where they are asked for.
    """

    def __init__(self) -> None:
        self.parts: dict[int, list[TokenSliceBatch]] = {}
        self.documents: dict[int, Documents] = {}
        self.states: dict[tuple[int, int], SequenceState] = {}
        self.buffers: dict[int, Buffer] = defaultdict(Buffer)
        self.passed: dict[Op, tuple[Tensor, ...]] = {}
        self.losses: dict[int, Tensor] = {}
        self.outputs: dict[int, dict[int, Any]] = defaultdict(dict)
        self.labels: dict[int, dict[int, Any]] = defaultdict(dict)

    def add_loss(self, micro_batch: int, loss: Tensor) -> None:
        """Add a token slice's share to the loss of its micro-batch.

        Args:
            loss: the share, a scalar.
        """
        earlier = self.losses.get(micro_batch)
        self.losses[micro_batch] = loss.detach() if earlier is None else earlier + loss.detach()

    def outputs_by_micro_batch(self, cuts: Cuts) -> list[Any]:
        """The outputs kept of each micro-batch, its token slices put together. Ranks that share these must all ask."""
        return _joined(self.outputs, cuts)

    def outputs_and_labels(self, cuts: Cuts) -> tuple[Any, Any]:
        """Outputs and labels of the whole batch; None where the last stage is not. Ranks as above must all ask."""
        if not self.outputs:
            return None, None
        labels = _joined(self.labels, cuts, read_by_all=True)
        return join_micro_batches(self.outputs_by_micro_batch(cuts)), join_micro_batches(labels)

    def forget_batch(self, micro_batch: int) -> None:
        """Let go of the data of a micro-batch that no op of this rank needs any more."""
        self.parts.pop(micro_batch, None)
        self.documents.pop(micro_batch, None)


def _joined(parts: Mapping[int, Mapping[int, Any]], cuts: Cuts, *, read_by_all: bool = False) -> list[Any]:
    """What there is of each micro-batch, its token slices put together in their order, whatever order they ran in."""
    return [
        join_token_slices(
            [of_one[number] for number in sorted(of_one)], cuts.of(micro_batch), cuts.ranks, read_by_all=read_by_all
        )
        for micro_batch, of_one in sorted(parts.items())
    ]
