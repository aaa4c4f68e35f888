"""The op in which NaN or infinity began, found by computing the last batch a second time.

`find_origin` observes the forwards and backwards that the engine replays, checks all results of each op, and names the
first rank, op and tensor that is not finite.

NaN spreads: in forwards to all later stages and token slices, in backwards to all earlier ones, and over ranks with
every sum. So each rank notes the first bad number of each of its ops. Of all notes the first one counts, which no other
can have caused: forwards precede backwards, and within them ops follow the order of their dependencies.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from deepspeed_ext.plan.ops import Op, OpKind
from deepspeed_ext.runtime.clocks import Observer
from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from deepspeed_ext.runtime.gradients.reductions import current_gradient
from deepspeed_ext.runtime.health.states import not_finite


class BadOp(NamedTuple):
    """An op with a bad number in its results. They are sorted from cause to effect."""

    backward: bool
    """False for a forward."""
    micro_batch: int
    """Number of the micro-batch on its replica."""
    order: tuple[int, int, int]
    """Place of the op and of the event in it, in the order of dependencies."""
    tensor: str
    """Name of the bad tensor in messages."""
    token_slice: int
    """Number of the token slice."""
    replica: int
    rank: int
    tokens: tuple[int, int] | None = None
    """First and last token of its part of the token slice, where sequence-parallel ranks share it."""


class Origin(NamedTuple):
    """Place where bad numbers began."""

    op: BadOp
    """The op with the first."""
    ranks: tuple[int, ...]
    """Ranks on which it was the first: ranks that share a layer may have it in common."""

    def __str__(self) -> str:
        """Text for messages."""
        ranks = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        at = f"micro-batch {self.op.micro_batch}, token slice {self.op.token_slice}"
        if self.op.tokens is not None:
            at = f"{at}, in its tokens {self.op.tokens[0]} to {self.op.tokens[1]}"
        return f"{self.op.tensor} on {ranks}, at {at}"


def find_origin(engine: TokenSlicePipelineEngine, micro_batches: Iterable[Any]) -> Origin | None:
    """Compute the last batch again and return the origin of bad numbers; None without any. Every rank must call it."""
    if not engine.can_replay:
        return None
    watch = _Watch(engine)
    with watch.watching():
        engine.replay(micro_batches, watch)
    firsts: list[BadOp | None] = [None] * dist.get_world_size()
    dist.all_gather_object(firsts, min(watch.found, default=None))
    found = sorted(each for each in firsts if each is not None)
    if not found:
        return None
    alike = [each for each in found if each[:4] == found[0][:4]]
    of_one_part = len({each.tokens for each in alike}) == 1
    first = found[0] if of_one_part else found[0]._replace(tokens=None)
    return Origin(first, tuple(sorted(each.rank for each in alike)))


class _Watch(Observer):
    """Checks the results of the ops of a rank."""

    def __init__(self, engine: TokenSlicePipelineEngine) -> None:
        self._engine = engine
        self._replica, self._rank = engine.grid.get_data_parallel_rank(), engine.global_rank
        self._weights = [(name, each) for name, each in engine.module.named_parameters() if each.requires_grad]
        self._spoilt: set[str] = set()
        self._op: Op | None = None
        self._events, self._looked_at_loss = 0, False
        self.found: list[BadOp] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Check the outputs of all modules, and their gradients."""
        hooks = [
            module.register_forward_hook(partial(self._output, name))
            for name, module in self._engine.module.named_modules()
            if name
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def op(self, op: Op) -> Iterator[None]:
        """Check an op, and after it the loss, or the gradients of weights."""
        self._op, self._events, self._looked_at_loss = op, 0, False
        yield
        self._look_at_loss()
        if op.kind is not OpKind.FORWARD:
            self._look_at_weight_gradients()
        self._op = None

    def _output(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        # Recomputed layers were checked in the forward, but not head and loss of a recomputed stage.
        if self._op is None or not (self._op.kind is OpKind.FORWARD or self._engine.module.recomputation.stages):
            return
        for tensor in tree_leaves(output):
            if torch.is_tensor(tensor) and tensor.is_floating_point():
                self._look(f"the output of layer {name}", tensor)
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._look_at_gradient, f"the gradient of the output of layer {name}"))

    def _look_at_gradient(self, name: str, gradient: Tensor) -> None:
        self._look_at_loss()
        self._look(name, gradient)

    def _look_at_loss(self) -> None:
        """Check once the loss of an op: in the forward, or in the second computation of its stage."""
        op, module = self._op, self._engine.module
        if self._looked_at_loss or op is None or op.stage != module.pipeline.last_stage:
            return
        computed_in_forward = not module.recomputation.stages
        if op.kind is OpKind.WEIGHT_GRADIENT or (op.kind is OpKind.FORWARD) != computed_in_forward:
            return
        self._looked_at_loss = True
        if (loss := self._engine.batch.losses.get(op.micro_batch)) is not None:
            self._look("the loss", loss)

    def _look_at_weight_gradients(self) -> None:
        held = (
            (name, gradient.detach())
            for name, weight in self._weights
            if name not in self._spoilt and (gradient := current_gradient(weight)) is not None
        )
        spoilt = not_finite(held)
        # Backwards run from the last layer to the first.
        for name in reversed(spoilt):
            self._note(f"the gradient of weight {name}")
        self._spoilt.update(spoilt)

    def _look(self, name: str, tensor: Tensor) -> None:
        self._events += 1
        if tensor.numel() and not torch.isfinite(tensor.detach()).all():
            self._note(name)

    def _note(self, name: str) -> None:
        op = self._op
        assert op is not None, "only within ops"
        backward = op.kind is not OpKind.FORWARD
        place = (-op.token_slice, -op.stage) if backward else (op.token_slice, op.stage)
        order = (*place, self._events)
        if self.found and self.found[-1][:2] == (backward, op.micro_batch) and self.found[-1].order[:2] == place:
            return  # the first of an op is enough
        replica, rank, tokens = self._replica, self._rank, self._tokens(op)
        self.found.append(BadOp(backward, op.micro_batch, order, name, op.token_slice, replica, rank, tokens))

    def _tokens(self, op: Op) -> tuple[int, int] | None:
        """First and last token of this rank's part of the token slice of an op; None if it has all of it."""
        if self._engine.module.sequence_ranks.size == 1:
            return None
        start, end = list(self._engine.batch.parts_of(op.micro_batch).bounds())[op.token_slice]
        return start, end - 1
