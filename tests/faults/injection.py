"""Wrong numbers put into a rank while it trains: in the loss, a gradient, a weight or a state of the optimizer."""

import io
from collections.abc import Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    redirect_stderr,
    redirect_stdout,
)
from dataclasses import dataclass
from typing import Any, Literal, Self
from unittest.mock import patch

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_ext.plan.ops import Op, OpKind
from deepspeed_ext.runtime.gradients.reductions import accumulated_gradient
from deepspeed_ext.runtime.health.states import states_of
from megatron_terapipe.training import build_engine as engines
from megatron_terapipe.training import trainer
from tests.end_to_end.launching import train_on_this_rank

Kind = Literal["loss", "output", "gradient", "weight gradient", "weight", "state", "bit", "spike"]
"""Where the number is wrong. `gradient` is that of a layer's output, `bit` flips one bit of a weight, and `spike`
multiplies the loss."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A wrong number."""

    kind: Kind
    value: float = float("nan")
    rank: int = 0
    iteration: int = 3
    """The first iteration in which it is there."""
    iterations: int = 1
    """Iterations in which it comes."""
    micro_batch: int = 0
    token_slice: int = 0
    name: str = ""
    """The layer's or the parameter's name; of a parameter that which contains it, the first on the rank."""
    once: bool = False
    """Whether it comes only the first time that a batch is computed, as from a defect of a device."""
    saved: bool = False
    """Whether bad weights and states are saved, as by a trainer that does not look at them."""


class Injection:
    """Puts a fault into an engine. An `Observer`."""

    def __init__(self, engine: Any, fault: Fault) -> None:
        self._engine, self._fault, self._op, self._done = engine, fault, None, False
        self._undo = ExitStack()
        if engine.global_rank != fault.rank and fault.kind != "spike":
            return
        self._undo.enter_context(engine.observers.joined_by(self))
        if fault.kind in ("loss", "spike"):
            loss_fn = engine.module.loss_fn
            changed = patch.object(engine.module, "loss_fn", lambda *given: self._changed_loss(loss_fn(*given)))
            self._undo.enter_context(changed)
        elif fault.kind in ("output", "gradient"):
            layer = dict(engine.module.named_modules())[fault.name]
            hook = layer.register_forward_hook(lambda _layer, _inputs, output: self._changed(output))
            self._undo.callback(hook.remove)

    def __enter__(self) -> Self:
        """Leave the engine as it was at the end of a block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the engine as it was."""
        self._undo.close()

    def begin(self) -> None:
        """Change a weight or a state before the batch."""
        fault = self._fault
        if not self._is_time() or self._engine.module.training is False:
            return
        if fault.kind == "bit":
            weight = self._state("weight").view(-1)
            words = weight.view({2: torch.int16, 4: torch.int32}[weight.element_size()])
            words[0] ^= 1 << 4  # the lowest may be rounded away by an update
        elif fault.kind == "weight":
            self._state("weight").view(-1)[0] = fault.value
        elif fault.kind == "state":
            self._state("exp_avg").view(-1)[0] = fault.value

    @contextmanager
    def op(self, op: Op) -> Iterator[None]:
        """Remember the op, and change the sum that the gradient of a weight is added to."""
        self._op = op
        if self._fault.kind == "weight gradient" and op.kind is not OpKind.FORWARD and self._is_here():
            weight = next(each for name, each in self._engine.module.named_parameters() if self._fault.name in name)
            accumulated_gradient(weight).view(-1)[0] = self._fault.value
        yield

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Let a phase be."""
        return nullcontext()

    def _is_time(self) -> bool:
        fault = self._fault
        first = not (fault.once and self._done)
        return first and self._engine.global_steps + 1 in range(fault.iteration, fault.iteration + fault.iterations)

    def _is_here(self) -> bool:
        here = (self._op.micro_batch, self._op.token_slice) == (self._fault.micro_batch, self._fault.token_slice)
        here = here and self._engine.module.training and self._is_time()
        self._done = self._done or here
        return here

    def _changed_loss(self, loss: Tensor) -> Tensor:
        if self._fault.kind == "spike":
            return loss * self._fault.value if self._is_time() and self._engine.module.training else loss
        return loss + self._fault.value if self._is_here() else loss

    def _changed(self, output: Tensor) -> Tensor | None:
        computes = self._op is not None and (
            self._op.kind is OpKind.FORWARD or self._engine.module.recomputation.stages
        )
        if not computes or not self._is_here():
            return None
        if self._fault.kind == "output":
            return output * self._fault.value
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * self._fault.value)
        return None

    def _state(self, kind: str) -> Tensor:
        of_kind = (each for each in states_of(self._engine) if each.kind == kind and self._fault.name in each.name)
        return next(of_kind).values


@contextmanager
def injected(fault: Fault | None) -> Iterator[None]:
    """Let engines that are built inside have a fault."""
    if fault is None:
        yield
        return
    build = engines.build_engine

    def build_with_fault(*given: Any, **named: Any) -> Any:
        engine = build(*given, **named)
        Injection(engine, fault)
        return engine

    with ExitStack() as patched:
        patched.enter_context(patch.object(engines, "build_engine", build_with_fault))
        if fault.saved:
            patched.enter_context(patch.object(trainer, "refuse_bad_states"))
        yield


def train_with_fault(words: Sequence[str], fault: Fault | None) -> tuple[int, str]:
    """Train on this rank: a function for `run_distributed`. Returns the exit code and the output."""
    torch.set_num_threads(1)
    engines.LAUNCHER_NOTICES_S = 0  # there is none
    # DeepSpeed asks for a CPU with fast fp16; slow will do.
    get_accelerator().is_fp16_supported = lambda: True
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output), injected(fault):
        return train_on_this_rank(words), output.getvalue()
