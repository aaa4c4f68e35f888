"""What a step would be captured with: no waits for the device or copies to it but of micro-batches, and equal calls.

The meta device is used as an accelerator, so that every crossing between host and device is detected: a copy or a read
of a value there is one here.

An op launches the same operators in every step, with the same numbers from the host, but for those named below. A CUDA
graph keeps these numbers: what differs has to become a tensor before an op can be captured (ADR 46).
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepspeed_ext import pointwise
from deepspeed_ext.plan.ops import Op, OpKind
from deepspeed_ext.plan.programs.program import COMPUTES, Instruction, InstructionKind
from deepspeed_ext.runtime.attention.flash_kernels import CudaFlash
from deepspeed_ext.runtime.attention.kernels import AttentionKernel, PlainAttention
from deepspeed_ext.runtime.state import sequence_state
from megatron_terapipe.data.loader import MicroBatch
from megatron_terapipe.model import experts
from megatron_terapipe.training.build_engine import build_engine
from tests.distributed import run_distributed
from tests.training.gpt_runs import Setup, batches, run_of

DEVICE = torch.device("meta")
LLAMA = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"
    " --untie-embeddings-and-output-weights --num-key-value-heads 2"
)
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
PACKED = "--reset-position-ids --reset-attention-mask"
EXPERTS = (
    "--num-experts 4 --swiglu --disable-bias-linear --moe-shared-expert-intermediate-size 16"
    " --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.01"
)
CUT = "--num-layers 2 --num-token-slices 3 --token-slices 9,15,8"
WINDOWS = "--sliding-window 9 --window-attn-skip-freq 2"
SETUPS = {
    "gpt": Setup(flags=CUT),
    "gpt, packed, dropout, zero-bubble": Setup(flags=f"{CUT} {PACKED} {DROPOUT} --pipeline-schedule zero-bubble"),
    "llama, packed, recomputed": Setup(flags=f"{CUT} {LLAMA} {PACKED} --recompute-activations"),
    "llama, windows, packed": Setup(flags=f"{CUT} {LLAMA} {WINDOWS} {PACKED}"),
    "llama, windows, soft cap": Setup(flags=f"{CUT} {LLAMA} {WINDOWS} --attention-softcap 30"),
    "llama, dropout, layers recomputed": Setup(flags=f"{CUT} {LLAMA} {DROPOUT} --recompute-granularity full"),
    "llama, packed, dropout, stages recomputed": Setup(
        flags=f"{CUT} {LLAMA} {PACKED} {DROPOUT} --recompute-granularity stage"
    ),
    "experts": Setup(flags=f"{CUT} {EXPERTS} --moe-expert-capacity-factor 1 --moe-input-jitter-eps 0.1"),
    "experts, packed, stages recomputed": Setup(
        flags=f"{CUT} {EXPERTS} {PACKED} --recompute-granularity stage"
        " --moe-router-load-balancing-type document_aux_loss"
    ),
    "norms of heads, scaled rotations": Setup(flags=CUT, family="qwen"),
}

LOOKS = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::equal",
    "aten::masked_select",
    "aten::_unique2",
    "aten::bincount",
}
"""Operations that the host waits for: it needs a value, or the size of the result depends on values."""

MAKERS = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}
"""Functions that copy numbers of the host into a tensor, which no dispatch mode sees."""


class _Copies(TorchDispatchMode):
    """Writes down operations in which host and device meet."""

    def __init__(self, seen: Callable[[str], None]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), keywords: Mapping[str, Any] | None = None
    ) -> Any:
        name = function._schema.name
        tensors = [each for each in tree_leaves([arguments, keywords or {}]) if isinstance(each, Tensor)]
        devices = {each.device.type for each in tensors}
        by_mask = name == "aten::index" and any(each.dtype is torch.bool for each in tensors[1:])
        if (name in LOOKS or by_mask) and DEVICE.type in devices:
            self._seen(f"{name} waits")
        if name in ("aten::_to_copy", "aten::copy_"):
            target = (keywords or {}).get("device")
            if {"cpu", DEVICE.type} <= devices | ({target.type} if target else set()):
                later = (keywords or {}).get("non_blocking")
                self._seen(f"{name} from {', '.join(sorted(devices))}{'' if later else ' waits'}")
        return function(*arguments, **(keywords or {}))


class _Makers(TorchFunctionMode):
    """Writes down tensors that are made of numbers of the host."""

    def __init__(self, seen: Callable[[str], None]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), keywords: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*arguments, **(keywords or {}))
        if function in MAKERS and result.device == DEVICE:
            self._seen(f"{function.__name__} waits")
        # A list of places becomes a tensor, too; slices and numbers do not.
        if function is Tensor.__getitem__ and arguments[0].device == DEVICE:
            if any(isinstance(each, int) for each in tree_leaves(arguments[1]) if isinstance(arguments[1], list)):
                self._seen("a list as an index waits")
        return result


def loaded(batch: MicroBatch) -> MicroBatch:
    """A micro-batch with tensors of its own, as the loader makes them."""
    return replace(batch, tokens=batch.tokens.contiguous(), labels=batch.labels.contiguous())


def _kernel(query: Tensor, window: int | None, softcap: float | None, **more: object) -> AttentionKernel:
    """The kernels of a CUDA device for bf16."""
    return CudaFlash(window) if softcap is None else PlainAttention(window=window, softcap=softcap)


def _grouped_mm(left: Tensor, right: Tensor, offs: Tensor) -> Tensor:
    """The kernel of a CUDA device for the products of all experts, which takes bf16 only."""
    return _GROUPED_MM(left.bfloat16(), right.bfloat16(), offs=offs).to(left.dtype)


_GROUPED_MM = F.grouped_mm


def crossings(setup: Setup) -> Counter[tuple[str, str]]:
    """Where host and device meet in a step of an engine: kind of instruction, and operation."""
    engine = build_engine(run_of(setup))
    engine.module.to(DEVICE)
    tallies = engine._tallies
    if tallies.any:
        tallies._step = tallies._step.to(DEVICE)
        for layer, row in zip(tallies._layers, tallies._step, strict=True):
            layer.counted_in_step, layer.values_in_step = row.split(tallies._extent)
    engine._executor._device = engine._links.device = DEVICE
    engine.set_dataiterator(iter(loaded(each) for each in batches(setup, 0)))
    engine.module.train()
    found: Counter[tuple[str, str]] = Counter()
    at: list[Instruction] = []

    def seen(what: str) -> None:
        found[at[-1].kind.value, what] += 1

    kernels = patch.multiple(sequence_state, kernel_for=_kernel, kernel_of_runs_for=lambda _, window: CudaFlash(window))
    grouped = patch.multiple(experts, _has_grouped_products=lambda _: True)
    in_bf16 = patch.object(F, "grouped_mm", _grouped_mm)
    # Torch does not know of autocast on the meta device.
    autocast = patch.object(torch, "is_autocast_enabled", lambda device_type: False)
    with engine._running(engine._plan(None, training=True, updates=True)):
        with kernels, grouped, in_bf16, autocast, _Makers(seen), _Copies(seen):
            for instruction in engine._program.instructions:
                at.append(instruction)
                engine._executor.execute(instruction)
    assert {loss.device for loss in engine.batch.losses.values()} == {DEVICE}
    assert all(each.grad.device == DEVICE for each in engine.module.parameters())
    return found


def crossings_of_the_loss() -> Counter[str]:
    """Where host and device meet when the micro-batches of a batch are weighed by their tokens."""
    engine = build_engine(run_of(Setup(micro_batches=3)))
    engine._loss._like = engine._loss._like.to(DEVICE)
    found: list[str] = []
    # The meta device has no messages.
    with patch.object(dist, "all_reduce"), _Makers(found.append), _Copies(found.append):
        engine._loss.weigh_by_tokens([3.0, 1.0, 2.0])
    weighed = engine._loss.weigh(torch.ones((), device=DEVICE), 2)
    assert weighed.device == engine._loss._num_tokens.device == DEVICE
    return Counter(found)


def _crossings_of_all() -> tuple[dict[str, Counter[tuple[str, str]]], Counter[str]]:
    return {name: crossings(setup) for name, setup in SETUPS.items()}, crossings_of_the_loss()


def test_only_loading_copies_to_the_device_and_nothing_waits() -> None:
    ((by_setup, of_the_loss),) = run_distributed(_crossings_of_all, 1)
    assert of_the_loss == {"aten::_to_copy from cpu": 1}, "token counts of all micro-batches"
    for name, found in by_setup.items():
        setup = SETUPS[name]
        # Tokens, labels, mask; of packed documents, positions and where they begin and end; numbers of documents.
        tensors = (5 if PACKED in setup.flags else 3) + ("document_aux_loss" in setup.flags)
        loading = InstructionKind.LOAD_MICRO_BATCH.value, "aten::_to_copy from cpu"
        assert found == {loading: tensors * setup.micro_batches}, name


@pytest.mark.parametrize(
    "waits",
    [
        lambda host, device: torch.tensor([1, 2], device=DEVICE),
        lambda host, device: device.new_tensor([1.0]),
        lambda host, device: device[[0, 1]],
        lambda host, device: host.to(DEVICE),
        lambda host, device: device.copy_(host),
        lambda host, device: device.sum().item(),
        lambda host, device: bool(device.sum() > 0),
        lambda host, device: device.cpu(),
        lambda host, device: device.tolist(),
        lambda host, device: device[device > 0],
        lambda host, device: device.nonzero(),
    ],
)
def test_whatever_waits_is_seen(waits: Callable[[Tensor, Tensor], Any]) -> None:
    found: list[str] = []
    host, device = torch.ones(3), torch.ones(3, device=DEVICE)
    # The meta device has no values to give, and says so once it was asked.
    with _Makers(found.append), _Copies(found.append), suppress(RuntimeError, NotImplementedError):
        waits(host, device)
    assert any(what.endswith("waits") for what in found)


LOSS_WEIGHT, DROPOUT_KEY = "aten::mul", "aten::full"
PLAIN = f"{CUT} --bf16 --zero-stage 1 {LLAMA} {WINDOWS}"
CAPTURED = {
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
    steps = {flags: _calls_of_steps(flags) for flags in CAPTURED}
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
    assert {flags: set(found) for flags, found in between_steps.items()} == CAPTURED
    assert set(between_micro_batches) == {LOSS_WEIGHT}
    assert packed_differ, "documents change the shapes of attention"
