"""The choice of FlashAttention-3, 4 or torch's own, and torch's adapters of the first two."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from deepspeed_ext.runtime.attention import flash_kernels
from deepspeed_ext.runtime.attention.flash_kernels import CudaFlash

WORKS, ABSENT, NO_CUTLASS = (
    1.0,
    ModuleNotFoundError("no", name="flash_attn.cute"),
    ModuleNotFoundError("no", name="cutlass"),
)
OUTDATED = ValueError("too many values to unpack (expected 2)")
CHOICES: list[tuple[tuple[int, int], dict[str, Any], list[str]]] = [
    ((9, 0), {"FA3": WORKS, "FA4": WORKS}, ["3"]),
    ((9, 0), {"FA3": ModuleNotFoundError("no", name="flash_attn_interface"), "FA4": WORKS}, ["4"]),
    ((9, 0), {"FA3": OSError("undefined symbol\nat"), "FA4": WORKS}, ["-3 is installed, but cannot be used: und", "4"]),
    (
        (9, 0),
        {"FA3": math.nan, "FA4": 1.1},
        ["-3 is installed, but cannot be used: its results differ", "-4 is ", "2; "],
    ),
    ((9, 0), {}, ["2; docs/how-to/gpu.md has newer ones"]),
    ((10, 0), {"FA3": WORKS, "FA4": WORKS}, ["4"]),
    (
        (10, 0),
        {"FA4": OUTDATED},
        ["-4 is installed, but cannot be used: too many values to unpack", "2; "],
    ),
    ((10, 0), {"FA4": NO_CUTLASS}, ["-4 is installed, but cannot be used: no", "2; "]),
    ((10, 0), {"FA4": ABSENT}, ["2; "]),
    ((8, 0), {"FA3": WORKS, "FA4": WORKS}, ["2"]),
    ((12, 0), {"FA3": WORKS, "FA4": WORKS}, ["2"]),
]
"""A device, the factor by which results of packages differ, or their error, and the ends of lines."""


@pytest.mark.parametrize(("capability", "packages", "expected"), CHOICES)
def test_the_newest_flash_attention_that_gives_torchs_results_is_used(
    capability: tuple[int, int], packages: dict[str, Any], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    active: list[str] = []

    def both_ways(samples: Any) -> list[Tensor]:
        found = packages[active[-1]] if active else WORKS
        if isinstance(found, Exception):
            raise found
        return [torch.ones(4), found * torch.ones(4)]

    monkeypatch.setattr(flash_kernels, "capability_of", lambda device: capability)
    monkeypatch.setattr(flash_kernels, "kernel_for", lambda query: CudaFlash())
    monkeypatch.setattr(flash_kernels, "_both_ways", both_ways)
    monkeypatch.setattr(flash_kernels.attention, "list_flash_attention_impls", lambda: list(packages))
    monkeypatch.setattr(flash_kernels.attention, "activate_flash_attention_impl", active.append)
    monkeypatch.setattr(flash_kernels.attention, "restore_flash_attention_impl", lambda _raise_warn: active.clear())
    samples = [(torch.ones(1, 2, 2, 8), torch.ones(1, 4, 1, 8), None)]
    lines = flash_kernels.activate_flash_attention(samples)
    assert len(lines) == len(expected)
    for line, part in zip(lines, expected, strict=True):
        assert (" attention by FlashAttention-" if part[0] != "-" else " warning: FlashAttention") + part in line
    assert active == ([] if expected[-1][0] == "2" else [f"FA{expected[-1]}"])
    active.clear()
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    (line,) = flash_kernels.activate_flash_attention(samples)
    assert line.startswith(" attention by FlashAttention-2") and not active


def test_nothing_is_activated_where_no_flash_attention_runs() -> None:
    assert flash_kernels.activate_flash_attention([(torch.ones(1, 2, 2, 8), torch.ones(1, 4, 1, 8), None)]) == []


class NewerFlash:
    """The functions of a package of newer flash attention, which compute nothing, and what they are given."""

    def __init__(self) -> None:
        self.given: list[dict[str, Any]] = []

    def forward(self, query: Tensor, *_: Any, **given: Any) -> tuple[Tensor, Tensor]:
        self.given.append(given)
        rows = (
            (query.shape[-2], query.shape[0]) if query.dim() == 3 else (query.shape[0], query.shape[2], query.shape[1])
        )
        return torch.empty_like(query), query.new_empty(rows, dtype=torch.float32)

    def backward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **given: Any) -> tuple[Tensor, ...]:
        self.given.append(given)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


@pytest.mark.parametrize("window", [None, 5])
def test_torchs_adapters_of_newer_flash_attention_take_these_calls(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On fake tensors of a device that is not there; the packages are stubs."""
    from torch.nn.attention import _fa3, _fa4

    fourth, third = NewerFlash(), NewerFlash()
    module = SimpleNamespace(_flash_attn_fwd=fourth.forward, _flash_attn_bwd=fourth.backward)
    monkeypatch.setattr(_fa4, "_fa4_import_module", lambda path: module)
    monkeypatch.setattr(_fa4, "_FA4_MODULE_PATH", "flash_attn.cute.interface")
    monkeypatch.setattr(_fa3, "_FA3_CUDA_FWD", lambda *given: (*third.forward(*given, all=given), None, None))
    monkeypatch.setattr(_fa3, "_FA3_CUDA_BWD", lambda *given: third.given.append({"all": given}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for adapter, forward, backward in (
        (_fa3, _fa3._fa3_flash_attention_forward_impl_default, _fa3._fa3_flash_attention_backward_impl),
        (_fa4, _fa4._fa4_flash_attention_forward_impl, _fa4._fa4_flash_attention_backward_impl),
    ):
        monkeypatch.setattr(adapter, "_get_device_major", lambda device: 9)
        operators = SimpleNamespace(_flash_attention_forward=forward, _flash_attention_backward=backward)
        monkeypatch.setattr(flash_kernels, "_aten", operators)
        with FakeTensorMode():
            query, key = (torch.empty(1, each, 4, 64, dtype=torch.bfloat16, device="cuda") for each in (8, 24))
            found = flash_kernels._both_ways([(query, key, window)])
        of_query, of_key = (8, 4, 64), (24, 4, 64)
        run = [of_query, (4, 8), of_query, of_key, of_key]
        assert [each.shape for each in found] == [*((1, *shape) for shape in run), *run]
    before = None if window is None else window - 1
    for number, given in enumerate(fourth.given):
        assert (given["causal"], given["window_size_left"], given["window_size_right"]) == (True, before, None)
        assert (given["cu_seqlens_q"] is not None, given["softmax_scale"]) == (number >= 2, 0.125)
    for given in third.given:
        numbers = [each for each in given["all"] if isinstance(each, bool | int | float)]
        # Scale, causality and window follow each other in both directions.
        at = numbers.index(0.125)
        assert numbers[at : at + 4] == [0.125, True, -1 if before is None else before, -1]
