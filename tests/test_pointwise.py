"""Pointwise functions: where they are compiled, and that compiled they compute the same."""

import tempfile
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed_ext import pointwise
from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.pointwise import CACHE_FOLDER, Pointwise, check_cache_folder, is_compiled
from deepspeed_ext.runtime.attention import kernels, positional_dropout
from megatron_terapipe.model import logits, mlp, norm, rotary


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def bits(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, generator=torch.Generator().manual_seed(1), dtype=torch.int64).int()


HEADS, TURNS, SCORES = (2, 6, 2, 4, 8), (1, 6, 1, 4), (2, 2, 2, 6, 9)
ROWS = numbers(*SCORES[:-1]) + 5, numbers(*SCORES), numbers(*SCORES[:-1])
SWISH, CLAMPED = mlp.Gate("silu"), mlp.Gate("quick-gelu", 0.7, 1.0)
CALLS: dict[str, tuple[Pointwise, Callable[[], tuple[Any, ...]]]] = {
    "swiglu": (mlp._gated, lambda: (numbers(2, 6, 16), SWISH)),
    "swiglu_backward": (mlp._gated_backward, lambda: (numbers(2, 6, 8), numbers(2, 6, 16), SWISH)),
    "geglu": (mlp._gated, lambda: (numbers(2, 6, 16), mlp.Gate("tanh"))),
    "geglu_backward": (mlp._gated_backward, lambda: (numbers(2, 6, 8), numbers(2, 6, 16), mlp.Gate("tanh"))),
    "weighted": (mlp._weighted_gated, lambda: (numbers(6, 16), numbers(6), CLAMPED)),
    "weighted_backward": (
        mlp._weighted_gated_backward,
        lambda: (numbers(6, 8), numbers(6, 16), numbers(6), CLAMPED),
    ),
    "with_sinks": (kernels.with_sinks, lambda: (numbers(2, 6, 4, 8), numbers(2, 4, 6), numbers(4))),
    "gradient_of_sinks": (
        kernels.gradient_of_sinks,
        lambda: (numbers(2, 6, 4, 8), numbers(2, 6, 4, 8), numbers(2, 4, 6) + 5, numbers(4)),
    ),
    "rms_norm": (norm._norm_of_sum, lambda: (numbers(2, 6, 16), None, 1.0, norm._rms_norm, numbers(16), 1e-5, False)),
    "rms_norm_backward": (
        norm._gradient_of_sum,
        lambda: (
            *(numbers(2, 6, 16), None, norm._rms_norm_backward),
            *(numbers(2, 6, 16), numbers(16), numbers(2, 6, 1), True),
        ),
    ),
    "norm_of_sum": (
        norm._norm_of_sum,
        lambda: (numbers(2, 6, 16), numbers(2, 6, 16), 0.5, norm._rms_norm, numbers(16), 1e-5, True),
    ),
    "layer_norm_of_sum": (
        norm._norm_of_sum,
        lambda: (numbers(2, 6, 16), None, 1.0, norm._layer_norm, numbers(16), numbers(16), 1e-5),
    ),
    "gradient_of_sum": (
        norm._gradient_of_sum,
        lambda: (
            *(numbers(2, 6, 16), numbers(2, 6, 16), norm._layer_norm_backward),
            *(numbers(2, 6, 16), numbers(16), numbers(16), numbers(2, 6, 1), numbers(2, 6, 1)),
        ),
    ),
    "part_of_mean": (norm._part_of_mean, lambda: (numbers(2, 6, 16),)),
    "with_known_mean": (norm._with_known_mean, lambda: (numbers(2, 6, 16), numbers(2, 6, 1), numbers(16), True)),
    "with_own_mean": (
        norm._with_own_mean,
        lambda: (numbers(2, 6, 16), numbers(2, 6, 16), numbers(16), numbers(2, 6, 1), False),
    ),
    "across": (norm._across, lambda: (numbers(2, 6, 16), numbers(2, 6, 16), numbers(2, 6, 1), numbers(2, 6, 1))),
    "turned_product": (rotary._turned_product, lambda: (numbers(*HEADS), numbers(*TURNS), numbers(*TURNS), False)),
    "product_turned_back": (
        rotary._product_turned_back,
        lambda: (numbers(2, 6, 4, 8), numbers(2, 6, 2, 8), numbers(2, 6, 2, 8), numbers(*TURNS), numbers(*TURNS), True),
    ),
    "turned": (rotary._turned, lambda: (numbers(2, 6, 4, 12), numbers(*TURNS), numbers(*TURNS), True, 4, False)),
    "turned_back": (rotary._turned, lambda: (numbers(2, 6, 4, 8), numbers(*TURNS), numbers(*TURNS), False, 0, True)),
    "exponentials": (logits._exponentials, lambda: (numbers(6, 16),)),
    "to_gradient": (logits._to_gradient, lambda: (numbers(6, 16), numbers(6, 1), numbers(6, 1), None)),
    "to_gradient_below_a_cap": (logits._to_gradient, lambda: (numbers(6, 16), numbers(6, 1), numbers(6, 1), 3.0)),
    "cap": (logits._cap, lambda: (numbers(6, 16), 3.0)),
    "rows": (positional_dropout._rows, lambda: (bits(2).long() * 12345678901, bits(6))),
    "head_rows": (positional_dropout._head_rows, lambda: (bits(2, 6), bits(4))),
    "by_group": (kernels._by_group, lambda: (numbers(2, 6, 4, 8), 2, torch.float64)),
    "by_token": (
        kernels._by_token,
        lambda: (numbers(4, 12, 8), torch.empty(2, 6, 4, 8), torch.float64),
    ),
    "row_sums": (
        kernels._row_sums,
        lambda: (numbers(2, 6, 4, 8), numbers(2, 6, 4, 8), 2, torch.float64),
    ),
    "weights": (
        kernels._weights,
        lambda: (numbers(*SCORES), 0.5, None, None, torch.float64, bits(2, 4, 6), bits(9), 0.3),
    ),
    "weights_in_a_window": (kernels._weights, lambda: (numbers(*SCORES), 0.5, 4, 2.0, torch.float64)),
    "backward": (
        kernels._backward,
        lambda: (numbers(*SCORES), 0.5, None, None, *ROWS, bits(2, 4, 6), bits(9), 0.3),
    ),
    "backward_in_a_window": (kernels._backward, lambda: (numbers(*SCORES), 0.5, 4, 2.0, *ROWS)),
    "dropped": (positional_dropout._dropped, lambda: (numbers(2, 6, 8), bits(2, 6), bits(8), 0.3)),
    "dropped_onto": (
        positional_dropout._dropped,
        lambda: (numbers(2, 6, 8), bits(2, 6), bits(8), 0.3, numbers(2, 6, 8)),
    ),
}


def assert_same(found: Any, expected: Any) -> None:
    for one, other in zip(*(each if isinstance(each, tuple) else (each,) for each in (found, expected)), strict=True):
        assert one.dtype is other.dtype
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("turns", [(None, None), (numbers(*TURNS), numbers(*TURNS))], ids=["GPT", "Llama"])
def test_keys_and_values_are_written_where_they_are_kept(turns: tuple[Tensor | None, Tensor | None]) -> None:
    traced = torch.compile(rotary._turned_product.function, fullgraph=True, backend="aot_eager_decomp_partition")
    written = []
    for function in (rotary._turned_product, traced):
        buffers = torch.zeros(2, 2, 9, 2, 8, dtype=torch.float64)
        queries = function(numbers(*HEADS), *turns, False, *buffers[:, :, 3:])
        assert torch.all(buffers[:, :, 3:] != 0) and not buffers[:, :, :3].any()
        written.append((queries[0], buffers))
    assert_same(*written)


@pytest.mark.parametrize("name", CALLS)
def test_each_is_one_graph_that_computes_the_same(name: str) -> None:
    """The graph of the compiler, without generated code, which takes seconds each."""
    function, arguments = CALLS[name]
    traced = torch.compile(function.function, fullgraph=True, backend="aot_eager_decomp_partition")
    given, expected = arguments(), arguments()
    found, wanted = traced(*given), function.function(*expected)
    if wanted is not None:
        assert_same(found, wanted)
    # Some write over their first argument.
    assert_same(given[0], expected[0])


def test_on_cpus_functions_are_not_compiled_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(pointwise.VARIABLE, raising=False)
    ran = []
    function = Pointwise(lambda tensor: ran.append(torch.compiler.is_compiling()) or tensor + 1)
    function(torch.ones(2))
    assert ran == [False]
    monkeypatch.setenv(pointwise.VARIABLE, "sometimes")
    with pytest.raises(UserError, match=r"sometimes is not known: set it to auto, always or never"):
        function(torch.ones(2))


def test_where_functions_are_compiled() -> None:
    assert [is_compiled("cpu", choice) for choice in pointwise.CHOICES] == [False, True, False]
    assert not any(is_compiled("meta", choice) for choice in pointwise.CHOICES)
    assert not is_compiled("cuda", "never")


def test_compiled_masks_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generated code for CPUs, which multiplies integers beyond their range."""
    function, arguments = CALLS["dropped_onto"]
    expected = function(*arguments())
    monkeypatch.setenv(pointwise.VARIABLE, "always")
    fresh = Pointwise(function.function)
    settings: list[dict[str, Any]] = []
    compiler = torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        wraps(compiler)(lambda function, **given: settings.append(given) or compiler(function, **given)),
    )
    assert_same(fresh(*arguments()), expected)
    assert "_compiled" in fresh.__dict__
    # Inductor's own launcher would hold the lock of Python's interpreter while it waits for a full queue.
    assert [given["options"] for given in settings] == [{"use_static_cuda_launcher": False}]


def test_compiled_code_of_others_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder has a name that all can foretell: another user may make it first, or a link in its place."""
    monkeypatch.delenv(CACHE_FOLDER, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    check_cache_folder({CACHE_FOLDER: "/anywhere"})
    assert not list(tmp_path.iterdir())
    check_cache_folder()
    (folder,) = tmp_path.iterdir()
    for attack in (
        lambda: folder.chmod(0o777),
        lambda: (folder.rmdir(), (tmp_path / "x").mkdir(), folder.symlink_to("x")),
    ):
        attack()
        monkeypatch.delenv(CACHE_FOLDER)  # torch has set it
        with pytest.raises(UserError, match=f"{folder}, where torch keeps code that it compiled, is another user's"):
            check_cache_folder()


def test_a_failure_of_the_compiler_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def stubborn(tensor: Tensor) -> Tensor:
        return tensor + 1

    def fail(*arguments: Any) -> Tensor:
        raise torch._dynamo.exc.TorchDynamoException("no compiler\nand much more")

    monkeypatch.setenv(pointwise.VARIABLE, "always")
    function = Pointwise(stubborn)
    function.__dict__["_compiled"] = fail
    with pytest.raises(UserError, match=r"^torch cannot compile stubborn here \(no compiler\): set .*=never, or train"):
        function(torch.ones(2))
