"""What a stage holds of the batch in progress: micro-batches, what they remember, buffers, losses."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from deepspeed_ext.runtime.batch import TokenSliceBatch
from deepspeed_ext.runtime.documents import Documents
from deepspeed_ext.runtime.sequence_state import SequenceState


@dataclass(slots=True)
class Buffer:
    """Tensors of one live token slice.

    Attributes:
        inputs: what the stage before sent; empty on the first stage.
        outputs: what goes to the stage after, until it is sent.
        roots: where backward starts: the loss on the last stage, else the outputs that need gradients, as edges of the
            graph, so that the tensors themselves can go once they are sent.
    """

    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    roots: tuple[Tensor | GradientEdge, ...] = ()


class LiveBatch:
    """One batch on one stage.

    Attributes:
        parts: per micro-batch, what its token slices read; on the stages that load.
        documents: per micro-batch, where its documents begin, when the module asks.
        states: per micro-batch, what its token slices leave to later ones.
        buffers: by the number that the program gives them.
        losses: per micro-batch, the weighted losses of its token slices so far; on the last stage.
        outputs: per micro-batch, the last layer's outputs, when an evaluation asks for them.
    """

    def __init__(self) -> None:
        self.parts: dict[int, list[TokenSliceBatch]] = {}
        self.documents: dict[int, Documents] = {}
        self.states: dict[int, SequenceState] = {}
        self.buffers: dict[int, Buffer] = defaultdict(Buffer)
        self.losses: dict[int, Tensor] = {}
        self.outputs: dict[int, list[Any]] = defaultdict(list)

    def add_loss(self, micro_batch: int, loss: Tensor) -> None:
        """Add a token slice's share to the loss of its micro-batch."""
        earlier = self.losses.get(micro_batch)
        self.losses[micro_batch] = loss.detach() if earlier is None else earlier + loss.detach()

    def forget(self, micro_batch: int) -> None:
        """Let go of a micro-batch that no op needs any more."""
        del self.states[micro_batch]
        self.parts.pop(micro_batch, None)
        self.documents.pop(micro_batch, None)
