"""A batch on one rank: its cuts, and between forward and backward its buffers, states and losses.

`RandomState` is kept in a buffer where a stage is computed again in the backward (`Recomputation`).
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.autograd.graph import GradientEdge

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.ops import Op, PipelineShape
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.attention.documents import Documents
from deepspeed_ext.runtime.gradients.weight_gradients import Product
from deepspeed_ext.runtime.micro_batch import TokenSliceBatch, join_micro_batches, join_token_slices
from deepspeed_ext.runtime.state.sequence_state import SequenceState
from deepspeed_ext.runtime.topology import SequenceParallelRanks


@dataclass(frozen=True)
class Recomputation:
    """Parts of a stage that are computed again in the backward."""

    stages: bool = False
    """Whole stages. A stage then keeps the input of a token slice, and keys and values for later ones."""
    interval: int = 0
    """Layers, this many at a time; 0 for none."""
    choose: Callable[[range], Collection[int]] | None = None
    """Chooses, of the numbers of a stage's layers, those that are computed again instead, one by one."""
    keeps_random_state: bool = True
    """Whether the second computation draws the same random numbers, from the generators of torch."""

    def runs_of_layers(self, layers: range) -> Iterator[tuple[slice, bool]]:
        """Runs of a stage's layers, counted from its first, and whether each is computed again by itself."""
        if self.choose is None:
            step = self.interval or len(layers) or 1
            yield from ((slice(start, start + step), bool(self.interval)) for start in range(0, len(layers), step))
            return
        chosen = {number - layers.start for number in self.choose(layers)}
        ends = sorted({0, len(layers), *chosen, *(number + 1 for number in chosen)})
        yield from ((slice(start, end), start in chosen) for start, end in pairwise(ends))


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


def bearing_gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor], parameters: Iterable[Tensor]) -> list[bool]:
    """Whether a stage that is computed again needs the gradient of each of its outputs [...].

    Without a graph it is unknown which outputs depend on weights. So all floating-point outputs count, if any tensor of
    the stage needs gradients, and the backward leaves out those of the outputs that do not.
    """
    needed = any(tensor.requires_grad for tensor in inputs) or any(weight.requires_grad for weight in parameters)
    return [needed and (output.is_floating_point() or output.is_complex()) for output in outputs]


CutByDocuments = Callable[[Documents], TokenSlices]
"""Lengths of the token slices of a micro-batch, given only its documents, so that all ranks cut alike."""


@dataclass(slots=True)
class Buffer:
    """Tensors of one live token slice of a stage."""

    inputs: tuple[Tensor, ...] = ()
    """Inputs from the previous stage, until their gradients are taken; empty on the first stage."""
    outputs: tuple[Tensor, ...] = ()
    """Outputs for the next stage, until they are sent or passed on."""
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


@dataclass(kw_only=True, eq=False)
class Batch:
    """A batch on one rank: facts that are known before it runs, and its state."""

    shape: PipelineShape
    token_slices: TokenSlices
    """Lengths of the token slices; of micro-batches that are cut by their documents, their number and their sum."""
    ranks: SequenceParallelRanks
    """Ranks that share each token slice."""
    by_documents: CutByDocuments | None
    """Gives the lengths of a micro-batch; None if all have those of `token_slices`."""
    rows: int
    """Rows of a micro-batch."""
    sequences: Callable[[int], range]
    """Numbers of a micro-batch's rows among all sequences of the run, for dropout."""
    training: bool
    """Whether a backward follows."""
    updates: bool = False
    """Whether gradients are summed over replicas, and the optimizer steps."""
    computes_loss: bool = True
    """Whether to call the loss function."""
    keeps_outputs: bool = False
    """Whether to keep the last layer's outputs, and the labels."""

    may_load: bool | None = field(default=None, init=False)
    """Whether a rank may load kernels in it; None until the program is chosen."""
    parts: dict[int, list[TokenSliceBatch]] = field(default_factory=dict, init=False)
    """By micro-batch, the data of its token slices; on the ranks that cut."""
    documents: dict[int, Documents] = field(default_factory=dict, init=False)
    """By micro-batch, starts of its documents, if the module reads them."""
    states: dict[tuple[int, int], SequenceState] = field(default_factory=dict, init=False)
    """By stage and micro-batch, state between token slices."""
    buffers: dict[int, Buffer] = field(default_factory=lambda: defaultdict(Buffer), init=False)
    """By number in the program."""
    passed: dict[Op, tuple[Tensor, ...]] = field(default_factory=dict, init=False)
    """Results that one stage of this rank passed to another, by the op that reads them."""
    losses: dict[int, Tensor] = field(default_factory=dict, init=False)
    """By micro-batch, the sum [] of the weighted losses of its token slices; on ranks with the last stage."""
    outputs: dict[int, dict[int, Any]] = field(default_factory=lambda: defaultdict(dict), init=False)
    """By micro-batch and token slice, the last layer's outputs, if they are kept."""
    labels: dict[int, dict[int, Any]] = field(default_factory=lambda: defaultdict(dict), init=False)
    """By micro-batch and token slice, the labels, if they are kept."""

    def __post_init__(self) -> None:
        self._own_parts = self.ranks.parts(self.token_slices)
        self._cuts: dict[int, tuple[TokenSlices, TokenSlices]] = {}

    def cut(self, micro_batch: int, documents: Documents | None) -> None:
        """Cut a micro-batch by its documents, before any other use; None if the module does not read them."""
        if documents is None or self.by_documents is None or micro_batch in self._cuts:
            return
        cut, like = self.by_documents(documents), self.token_slices
        if len(cut) != len(like) or cut.seq_length != like.seq_length:
            raise UserError(
                f"cut_by_documents gave {len(cut)} token slices of {cut.seq_length} tokens ({cut}), and the module has "
                f"{len(like)} of {like.seq_length}: give as many"
            )
        self._cuts[micro_batch] = cut, self.ranks.parts(cut)

    @property
    def extent(self) -> tuple[bool | int | PipelineShape, ...]:
        """All that determines the kernels of this batch, but for `lengths`."""
        return self.shape, self.rows, self.training, self.computes_loss, self.keeps_outputs

    def lengths(self) -> set[tuple[str, int]]:
        """Lengths of the token slices and of the keys that they attend to, with the name of their kind."""
        cuts = [cut.lengths for cut, _ in self._cuts.values()] or [self.token_slices.lengths]
        return {
            pair for cut in cuts for pair in (*(("tokens", n) for n in cut), *(("keys", n) for n in accumulate(cut)))
        }

    def token_slices_of(self, micro_batch: int) -> TokenSlices:
        """Return the lengths of the token slices of a micro-batch."""
        return self._cuts.get(micro_batch, (self.token_slices,))[0]

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
                self.ranks,
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
        state = (
            self.parts,
            self.documents,
            self.states,
            self.buffers,
            self.passed,
            self.losses,
            self.outputs,
            self.labels,
        )
        for each in state:
            each.clear()
