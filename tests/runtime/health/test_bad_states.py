"""States that are no numbers are found, and no others."""

import torch
from torch import nn

from deepspeed_ext.runtime.health.bad_states import MASTER, WEIGHT, BadState, State, described, not_finite


def state(kind: str, *values: float, dtype: torch.dtype = torch.float32) -> State:
    return State("2.mlp.up.weight", nn.Parameter(torch.zeros(1)), kind, torch.tensor(values, dtype=dtype))


def test_nan_and_both_infinities_are_found() -> None:
    bad = [state(WEIGHT, 1.0, value) for value in (float("nan"), float("inf"), -float("inf"))]
    assert not_finite([state(WEIGHT, 1.0, 2.0), *bad, state("exp_avg", 0.0)]) == bad


def test_the_largest_numbers_of_each_dtype_are_numbers() -> None:
    largest = [
        state(WEIGHT, *[torch.finfo(dtype).max] * 9, dtype=dtype)
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    ]
    assert not_finite([*largest, state(MASTER)]) == []


def test_states_are_named_with_their_rank_and_many_are_counted() -> None:
    assert str(state(WEIGHT)) == "weight 2.mlp.up.weight"
    assert str(state("exp_avg")) == "exp_avg of 2.mlp.up.weight"
    bad = [BadState(rank, "weight 3.bias", 2, 8) for rank in range(5)]
    first = "weight 3.bias on rank 0 (2 of 8 numbers)"
    assert described(bad[:1]) == first
    assert described(bad).startswith(first) and described(bad).endswith("on rank 2 (2 of 8 numbers) and 2 more")
