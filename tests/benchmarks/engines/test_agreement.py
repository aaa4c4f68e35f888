"""Every engine of the benchmark computes what plain torch does, or refuses and says how many micro-batches it needs."""

from dataclasses import replace

import torch

from benchmarks.engines.pipelines import Engine, Entry, Job, catalogue, plain
from benchmarks.engines.results import IN_ONE_THREAD, Measured, Name
from benchmarks.engines.turns import TOLERANCE, Competition, largest_difference
from megatron_terapipe.config import ModelConfig
from tests.distributed import run_distributed

MODEL = ModelConfig(
    num_layers=4,
    hidden_size=16,
    num_attention_heads=2,
    seq_length=32,
    vocab_size=256,
    untie_embeddings_and_output_weights=True,
)
WRONG = Name("of a test", "half the loss")
NEEDED = {"1F1B": 2, "DualPipeV": 4}
"""Fewest micro-batches on two ranks, by schedule; the others take one."""


def _half_the_loss(job: Job) -> Engine:
    engine = plain(job, threads=1)
    for weight in engine.weights.values():
        weight.register_hook(lambda gradient: gradient / 2)
    return engine


def _measured() -> list[tuple[Measured, ...]]:
    job = Job(MODEL, 1, 2, frozenset((0,)))
    # To find the orders of `optimised`, numba compiles for longer than all of this test takes.
    entries = [
        each for each in catalogue(4) if "optimised" not in each.name.schedule and "2 threads" not in each.name.schedule
    ]
    few = Competition(job, entries)
    many = Competition(replace(job, num_micro_batches=4), [*entries, Entry(WRONG, _half_the_loss)])
    for each in (few, many):
        each.round(0)
    return [few.measured(), many.measured()]


def test_engines_agree_with_plain_torch_or_say_why_not() -> None:
    (few, many), others = run_distributed(_measured, 2)
    assert [each.name for each in few + many] == [each.name for measured in others for each in measured]
    assert {each.schedule.split(",")[0]: each.needs for each in few if each.needs} == NEEDED
    *timed, wrong = many
    assert wrong.name == WRONG and not wrong.seconds and "gradients by 5" in (wrong.problem or "")
    for each in [*timed, *(each for each in few if each.needs is None)]:
        assert each.problem is None and len(each.seconds) == 1, each
        assert each.loss_difference is not None and each.loss_difference < TOLERANCE
        assert each.gradient_difference is not None and each.gradient_difference < TOLERANCE
        assert sum(each.peak_bytes) > 0
    assert timed[0].name == IN_ONE_THREAD and timed[0].gradient_difference == 0


def test_the_largest_difference_is_a_share_of_the_largest_element() -> None:
    expected = {"weight": torch.tensor([[4.0, 1.0]]), "bias": torch.tensor([1.0])}
    assert largest_difference({"weight": torch.tensor([4.0, 2.0])}, expected) == 0.25
    assert largest_difference({"weight": torch.tensor([4.0, 1.0]), "bias": torch.tensor([0.5])}, expected) == 0.5
