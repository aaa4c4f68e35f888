"""Defects of DeepSpeed 0.19.8's pipeline engine that ours does not have. Some tests run both."""

from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec
from deepspeed.utils.timer import BACKWARD_MICRO_TIMER, FORWARD_MICRO_TIMER
from torch import Tensor, nn

from tests.distributed import run_distributed
from tests.runtime import expert_layers
from tests.runtime.equivalence import stock
from tests.runtime.reference import reference_gradients
from tests.runtime.training import Setup, build, feed, losses, weights

CUT = (9, 1, 8, 6)
DENSE = Setup(pp=2, cut=(3, 2, 1))
"""Our engine on the layers of `stock`, in three token slices."""


def ours(setup: Setup, layers: list[Any], config: dict[str, Any] | None = None, *, lr: float = 1.0, **keywords: Any):
    keywords.setdefault("loss_fn", stock.squared_error)
    return build(
        setup,
        layers=layers,
        config=config,
        activation_spec=None,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr),
        **keywords,
    )


def norm_of_all(ranks: list[dict[str, np.ndarray]]) -> float:
    """2-norm over all stages, each tied weight counted once."""
    merged = {name: value for rank in ranks for name, value in rank.items()}
    return float(np.sqrt(sum(np.square(value.astype(np.float64)).sum() for value in merged.values())))


def _on_one() -> dict[str, Any]:
    return {"mask": _step_with_a_mask(Setup(cut=(stock.TOKENS,))), "recompute": _recompute_lookup()}


def _on_two() -> dict[str, Any]:
    clipped = [_clipped_updates(tied) for tied in (False, True)]
    # Last the one that changes the accelerator.
    return {"clipped": clipped, "breakdown": _breakdown(Setup(pp=2, cut=CUT)), "fp16": _tied_copies_in_fp16()}


@pytest.fixture(scope="module")
def on_one() -> dict[str, Any]:
    return run_distributed(_on_one, 1)[0]


@pytest.fixture(scope="module")
def on_two() -> list[dict[str, Any]]:
    return run_distributed(_on_two, 2)


def _on_four() -> dict[str, Any]:
    found: dict[str, Any] = {"norm": _reported_norm()}
    if torch.distributed.get_rank() == 0:
        found["on one rank"] = expert_layers.trained_on_one()
    # Last the one that changes the accelerator.
    return found | {"experts": expert_layers.trained_in_all_setups()}


@pytest.fixture(scope="module")
def on_four() -> list[dict[str, Any]]:
    return run_distributed(_on_four, 4)


# ---------------------------------------------------------------------- clipping counts one stage (U1)

CLIP = 0.01


def _update(engine: Any, batch: Any) -> dict[str, np.ndarray]:
    before = weights(engine)
    engine.train_batch(batch)
    after = weights(engine)
    return {name: before[name] - after[name] for name in before}


def _clipped_updates(tied: bool) -> tuple[dict, dict, float, float]:
    config = {"gradient_clipping": CLIP}
    theirs = _update(stock.stock_engine(stock.dense_layers(tied=tied), config, stages=2), iter(stock.pairs(2)))
    engine = ours(DENSE, stock.dense_layers(tied=tied), config, partition="uniform")
    mine = _update(engine, iter(stock.pairs(2)))
    free = ours(DENSE, stock.dense_layers(tied=tied), partition="uniform")
    whole = _update(free, iter(stock.pairs(2)))
    return theirs, mine, whole, [engine.get_global_grad_norm(), free.get_global_grad_norm()]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_clipping_counts_every_stage_and_every_tied_weight_once(tied: bool, on_two) -> None:
    theirs, mine, whole, norms = zip(*(found["clipped"][tied] for found in on_two), strict=True)
    assert norm_of_all(theirs) > 1.02 * CLIP, "DeepSpeed now clips pipelines rightly: drop our clipping"
    assert norm_of_all(mine) == pytest.approx(CLIP, rel=1e-3)  # digits of a step of 0.01 from weights of 0.5
    true_norm = norm_of_all(whole)
    for reported in norms:
        assert reported == pytest.approx([true_norm, true_norm], rel=1e-4), "before clipping, on every rank"


def _sgd_in_groups(parameters: Any) -> torch.optim.Optimizer:
    """Weights in more groups on later ranks, each of which ZeRO sums a norm for."""
    weights, number = list(parameters), 1 + torch.distributed.get_rank() // 2
    return torch.optim.SGD([{"params": weights[first::number]} for first in range(number)], lr=1.0)


IN_GROUPS = Setup(pp=2, dp=2, cut=CUT, zero=1)


def _reported_norm() -> float:
    engine = build(IN_GROUPS, optimizer=_sgd_in_groups)
    engine.train_batch(feed(engine, IN_GROUPS))
    return float(engine.get_global_grad_norm())


def test_gradient_norm_is_that_of_the_whole_model_however_weights_are_grouped(on_four) -> None:
    _, gradients = reference_gradients(IN_GROUPS)
    assert [found["norm"] for found in on_four] == pytest.approx([norm_of_all([gradients])] * 4, rel=1e-6)


# ---------------------------------------------------------------------- norms of experts are means over copies


@pytest.mark.parametrize("number", range(len(expert_layers.SETUPS)), ids=map(str, expert_layers.SETUPS))
def test_ranks_that_share_experts_step_as_one_rank(number: int, on_four) -> None:
    """In DeepSpeed a stage without experts, and tensor-parallel ranks that share experts, have no part in a norm."""
    expected, setup = on_four[0]["on one rank"], expert_layers.SETUPS[number]
    relative = {"fp32": 1e-6, "bf16": 2e-2, "fp16": 2e-3}[setup.dtype]
    (holders,) = (ranks for ranks in setup.layout.groups("expert_copies") if expert_layers.BAD_RANK in ranks)
    for found in (of_rank["experts"][number] for of_rank in on_four):
        assert found["losses"] == pytest.approx(expected["losses"], rel=relative)
        assert found["norms"] == pytest.approx(expected["norms"], rel=relative)
        assert setup.dtype != "fp32" or found["zeros"] == expected["zeros"]
        for name, weight in found["weights"].items():
            whole = expected["weights"][name]
            own = whole[found["first"] :][: len(weight)] if name.endswith("experts") else whole
            np.testing.assert_allclose(weight, own, rtol=relative, atol=relative, err_msg=name)
        assert found["skipped"], "a bad update of one rank is an update of none"
        assert found["differences"] == []
        assert len(found["broken"]) == (len(holders) > 1)
        assert all("1.experts" in line and "(ranks with the same experts)" in line for line in found["broken"])


# ---------------------------------------------------------------------- tied weights part (U2)

FP16 = {
    "fp16": {"enabled": True, "initial_scale_power": 8},
    "data_types": {"grad_accum_dtype": "fp32"},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 10**5, "allgather_bucket_size": 10**5},
}


def _tied_copies_in_fp16() -> tuple[np.ndarray, np.ndarray, float]:
    # DeepSpeed asks for a CPU with fast fp16; slow will do.
    get_accelerator().is_fp16_supported = lambda: True
    copies = []
    for make in (
        lambda layers: stock.stock_engine(layers, FP16, stages=2, lr=0.1),
        lambda layers: ours(DENSE, layers, FP16, lr=0.1, partition="uniform"),
    ):
        engine = make(stock.dense_layers(tied=True))
        for step in range(3):
            engine.train_batch(iter(stock.pairs(2, dtype=torch.float16, seed=step)))
        copies.append(weights(engine)["tied_modules.square.weight"])
    return *copies, float(engine.optimizer.cur_scale)


def test_tied_weights_stay_equal_in_fp16_with_fp32_accumulation(on_two) -> None:
    (their_first, first, _), (their_last, last, scale) = (found["fp16"] for found in on_two)
    assert not np.array_equal(their_first, their_last), "DeepSpeed now reduces these: drop our reduction"
    assert np.array_equal(first, last)
    assert scale == 2.0**8, "no step may have been skipped for overflow"


# ---------------------------------------------------------------------- wall_clock_breakdown crashes (U4)


BREAKDOWN = {"wall_clock_breakdown": True}


def _breakdown(setup: Setup) -> tuple[list[float], float, float]:
    engine = build(setup, config=BREAKDOWN)
    found = losses(engine, setup, 2)
    return found, *(engine.timers(name).elapsed(reset=False) for name in (FORWARD_MICRO_TIMER, BACKWARD_MICRO_TIMER))


def test_wall_clock_breakdown_trains_and_measures(on_two) -> None:
    for found, forward_ms, backward_ms in (each["breakdown"] for each in on_two):
        assert len(found) == 2
        assert forward_ms > 0
        assert backward_ms > 0


# ---------------------------------------------------------------------- tensors without gradients between stages (U5)


class Widen(nn.Module):
    """Passes on the hidden state, a float mask, an unused tensor, and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(stock.WIDTH, stock.WIDTH)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        hidden, mask = inputs
        hidden = self.linear(hidden)
        return hidden, mask, hidden * 2.0, torch.arange(hidden.shape[1])


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(stock.WIDTH, stock.WIDTH)

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        hidden, mask, _, positions = inputs
        assert positions.dtype == torch.int64
        assert not mask.requires_grad
        return self.linear(hidden * mask.unsqueeze(-1)) * (1.0 + positions.unsqueeze(-1))


def masked_pairs(count: int) -> list[Any]:
    torch.manual_seed(3)
    return [((inputs, torch.rand(inputs.shape[:2])), labels) for inputs, labels in stock.pairs(count)]


def _step_with_a_mask(setup: Setup) -> tuple[float, dict[str, np.ndarray]]:
    engine = ours(setup, [LayerSpec(Widen), LayerSpec(Masked), LayerSpec(stock.Dense)], partition="uniform")
    return engine.train_batch(iter(masked_pairs(2))).item(), weights(engine)


def test_tensors_without_a_gradient_pass_between_stages(on_one) -> None:
    # One token slice: positions start at 0 in each.
    loss, expected = on_one["mask"]
    # The middle stage takes four tensors and gives one, so the shapes of its two sides differ.
    for found_loss, found in run_distributed(_step_with_a_mask, 3, Setup(pp=3, cut=(stock.TOKENS,))):
        assert found_loss == loss
        for name, weight in found.items():
            np.testing.assert_array_equal(weight, expected[name])


# ---------------------------------------------------------------------- recomputing an embedding (U6)


def _recompute_lookup() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    layers = [LayerSpec(stock.Lookup), LayerSpec(stock.Dense)]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, stock.WIDTH, (2, stock.ROWS, stock.TOKENS), generator=generator)
    batches = [(row, labels) for row, (_, labels) in zip(tokens, stock.pairs(2), strict=True)]
    theirs = stock.stock_engine(layers, {}, stages=1, activation_checkpoint_interval=1)
    with pytest.raises(AssertionError, match="loss must be"):  # one without a graph
        theirs.train_batch(iter(batches))
    setup = Setup(cut=(3, 2, 1))
    updates = [
        _update(ours(setup, layers, activation_checkpoint_interval=interval), iter(batches)) for interval in (1, 0)
    ]
    return tuple(updates)


def test_recompute_reaches_the_embedding(on_one) -> None:
    recomputed, stored = on_one["recompute"]
    assert np.abs(stored["0.weight"]).max() > 0
    assert recomputed.keys() == stored.keys()
    for name in stored:
        np.testing.assert_array_equal(recomputed[name], stored[name])
