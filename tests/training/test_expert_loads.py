"""Loads of experts that the trainer reports, from the numbers that layers count."""

from types import SimpleNamespace
from typing import Any

import torch

from deepspeed_ext.runtime.state.counts import StepTally
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.training.expert_loads import ExpertWatch
from megatron_terapipe.training.records import ExpertLoads

MODEL = ModelConfig(
    num_layers=3, hidden_size=8, num_attention_heads=2, seq_length=8, num_experts=4, moe_layer_freq="2",
    moe_aux_loss_coeff=0.5, moe_z_loss_coeff=0.1,
)  # fmt: skip


class Reported(list[Any]):
    """Lines, and notes as texts."""

    __call__ = note = list.append


def test_loads_are_shares_by_transformer_layer_and_an_expert_that_starts_to_starve_is_reported_once() -> None:
    # The engine has two layers before the transformer layers, and two after them.
    def tally(first: tuple[int, ...]) -> StepTally:
        counts, values = torch.zeros(7, 4, dtype=torch.int64), torch.zeros(7, 2, dtype=torch.float64)
        counts[2], counts[4] = torch.tensor(first), torch.tensor((5, 5, 5, 5))
        values[2], values[4] = torch.tensor((1.5, 2.0)), torch.tensor((1.0, 4.0))
        return StepTally(50, counts, values)

    even, uneven = (10, 10, 10, 10), (1, 20, 12, 7)
    tallies = iter([tally(even), *[tally(uneven)] * 3, tally(even), *[tally((1, 1, 0, 0))] * 2])
    engine, reported = SimpleNamespace(take_tally=lambda: next(tallies)), Reported()
    watch = ExpertWatch(MODEL, engine, reported)  # type: ignore[arg-type]
    for iteration in range(80, 381, 50):
        watch.read(iteration)
    first, second = reported[:2]
    assert isinstance(first, ExpertLoads) and (first.iteration, first.iterations, first.layers) == (80, 50, (0, 2))
    assert first.loads == ((1.0,) * 4, (1.0,) * 4) and first.losses == {"load_balancing_loss": 1.25, "z_loss": 3.0}
    assert second.loads == ((0.1, 2.0, 1.2, 0.7), (1.0,) * 4)
    notes = {index: each for index, each in enumerate(reported) if isinstance(each, str)}
    assert notes == {
        7: " warning: expert 2 of layer 0 received 0.0% of an even share of tokens over the last 100 iterations, and 1 "
        "more below 10%: raise --moe-aux-loss-coeff, or add --moe-router-enable-expert-bias"
    }
