"""An op launches the same operators in every step, with the same numbers from the host, but for those named here.

A CUDA graph keeps these numbers: what differs has to become a tensor before an op can be captured (ADR 46).
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepspeed_ext import pointwise
from deepspeed_ext.plan.ops import Op, OpKind
from deepspeed_ext.plan.programs.program import COMPUTES
from megatron_terapipe.training.build_engine import build_engine
from tests.distributed import run_distributed
from tests.training.gpt_runs import Setup, batches, run_of
from tests.training.test_no_wait_in_a_step import CUT, DROPOUT, LLAMA, PACKED, WINDOWS

LOSS_WEIGHT, DROPOUT_KEY = "aten::mul", "aten::full"
PLAIN = f"{CUT} --bf16 --zero-stage 1 {LLAMA} {WINDOWS}"
SETUPS = {
    PLAIN: {LOSS_WEIGHT},
    f"{CUT} --bf16 {DROPOUT} --recompute-granularity stage --pipeline-schedule zero-bubble": {LOSS_WEIGHT, DROPOUT_KEY},
}

Call = tuple[str, tuple[Any, ...]]
"""An operator, and its arguments: numbers, and of tensors shape, type and strides."""


class _Calls(TorchDispatchMode):
    """Writes down all operators."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Call] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), keywords: Mapping[str, Any] | None = None
    ) -> Any:
        given = [
            (*each.shape, each.dtype, *each.stride()) if isinstance(each, Tensor) else each
            for each in tree_leaves([arguments, keywords or {}])
        ]
        self.found.append((function._schema.name, tuple(given)))
        return function(*arguments, **(keywords or {}))


def _calls_of_steps(flags: str) -> list[list[tuple[Op, list[Call]]]]:
    """The calls of each op, in two steps on other data, after a first one that also checks the layers."""
    setup = Setup(flags=flags)
    engine, steps = build_engine(run_of(setup)), []
    for data_rank in range(3):
        engine.set_dataiterator(iter(batches(setup, data_rank)))
        engine.module.train()
        found = []
        with engine._running(engine._plan(None, training=True, updates=True)):
            for instruction in engine._program.instructions:
                with _Calls() as calls:
                    engine._executor.execute(instruction)
                if instruction.kind in COMPUTES:
                    found.append((instruction.op, calls.found))
        steps.append(found)
        engine._executor.finish(engine.batch)
        engine.optimizer.zero_grad()
        engine.global_steps += 1
    return steps[1:]


def _differences(first: list[Call], second: list[Call]) -> Counter[str]:
    """Operators that are not the same in two ops."""
    assert [name for name, _ in first] == [name for name, _ in second]
    return Counter(one[0] for one, other in zip(first, second, strict=True) if one != other)


def _differing() -> tuple[dict[str, Counter[str]], Counter[str], bool]:
    """By setup, what differs between steps; between micro-batches; and whether packed documents change an op."""
    os.environ[pointwise.VARIABLE] = "never"
    steps = {flags: _calls_of_steps(flags) for flags in SETUPS}
    between_steps = {
        flags: sum((_differences(one, other) for one, other in _pairs(*found)), Counter[str]())
        for flags, found in steps.items()
    }
    at_place: dict[tuple[OpKind, int, int], list[Call]] = {}
    between_micro_batches = Counter[str]()
    for op, calls in steps[PLAIN][0]:
        between_micro_batches += _differences(at_place.setdefault((op.kind, op.stage, op.token_slice), calls), calls)
    packed = _calls_of_steps(f"{CUT} --bf16 {LLAMA} {PACKED}")
    return (
        between_steps,
        between_micro_batches,
        any(sorted(map(str, one)) != sorted(map(str, other)) for one, other in _pairs(*packed)),
    )


def _pairs(
    first: list[tuple[Op, list[Call]]], second: list[tuple[Op, list[Call]]]
) -> Iterator[tuple[list[Call], list[Call]]]:
    """Calls of the same op in two steps."""
    for (op, calls), (same, later) in zip(first, second, strict=True):
        assert op == same
        yield calls, later


def test_only_loss_weights_and_keys_of_dropout_differ() -> None:
    ((between_steps, between_micro_batches, packed_differ),) = run_distributed(_differing, 1)
    assert {flags: set(found) for flags, found in between_steps.items()} == SETUPS
    assert set(between_micro_batches) == {LOSS_WEIGHT}
    assert packed_differ, "documents change the shapes of attention"
