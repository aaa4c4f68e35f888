"""Batch sizes over a run, and its length."""

import pytest
from hypothesis import given
from hypothesis import strategies as draw

from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.config import BatchConfig
from megatron_terapipe.config.batch import BatchSizes
from megatron_terapipe.errors import ConfigError


@draw.composite
def ramps(draw_from) -> dict[str, int]:
    start, increment = draw_from(draw.integers(1, 20)), draw_from(draw.integers(1, 20))
    final = start + draw_from(draw.integers(1, 12)) * increment
    return {"start": start, "increment": increment, "samples": draw_from(draw.integers(1, 2000)), "final": final}


@draw.composite
def stepped(draw_from) -> BatchSizes:
    later = sorted(draw_from(draw.sets(draw.integers(1, 400), max_size=6)))
    return BatchSizes(steps=tuple((first, draw_from(draw.integers(1, 40))) for first in (0, *later)), counts_part=True)


any_sizes = ramps().map(lambda ramp: BatchSizes.on_ramp(**ramp)) | stepped()


@given(ramps(), draw.integers(0, 3000))
def test_the_size_is_megatrons(ramp: dict[str, int], consumed: int) -> None:
    calculators = pytest.importorskip("megatron.core.num_microbatches_calculator")
    theirs = calculators.RampupBatchsizeNumMicroBatchesCalculator(
        ramp["final"], 1, 1, False, 1, *list(ramp.values())[:3]
    )
    sizes = BatchSizes.on_ramp(**ramp)
    for each in (consumed, *(max(0, first + off) for first, _ in sizes.steps for off in (-1, 0, 1))):
        theirs.update(each, consistency_check=False)
        assert sizes.at(each) == theirs.get_current_global_batch_size()


@given(ramps())
def test_it_never_falls_and_ends_at_the_last(ramp: dict[str, int]) -> None:
    sizes = BatchSizes.on_ramp(**ramp)
    seen = [sizes.at(consumed) for consumed in range(ramp["samples"] + 2)]
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (ramp["start"], ramp["final"])


@given(any_sizes, draw.integers(0, 60), draw.integers(0, 60))
def test_a_run_in_two_parts_consumes_as_many_samples(sizes: BatchSizes, first: int, second: int) -> None:
    consumed = 0
    for _ in range(first + second):
        consumed += sizes.at(consumed)
    assert sizes.consumed_after(first + second) == consumed
    assert sizes.consumed_after(second, sizes.consumed_after(first)) == consumed


@given(ramps(), draw.integers(0, 5000))
def test_iterations_within_samples_are_megatrons(ramp: dict[str, int], samples: int) -> None:
    """Megatron's `update_train_iters`: it counts the ramp iteration by iteration, then divides the rest."""
    sizes = BatchSizes.on_ramp(**ramp)
    iterations = consumed = 0
    while consumed <= ramp["samples"] and consumed <= samples:
        consumed += sizes.at(consumed)
        iterations += 1
    if samples > consumed:
        iterations += (samples - consumed) // sizes.final
    assert sizes.iterations_within(samples) == iterations


STEPS = {
    # Of Megatron-LM's tests and of its script for 175B parameters: tokens, sequence length, and sizes by samples.
    "0:384 200B:768 400B:1152": (4096, ((0, 384), (48_828_125, 768), (97_656_250, 1152))),
    "0:16 2.4B:320 4.8B:624 7.2B:928 9.6B:1232 12B:1536": (
        2048,
        ((0, 16), (1_171_875, 320), (2_343_750, 624), (3_515_625, 928), (4_687_500, 1232), (5_859_375, 1536)),
    ),
    # In any order, with commas, and cut off to whole samples and sizes; the size may fall.
    " 1.5k:8, 0:16.9": (1000, ((0, 16), (1, 8))),
    "9:4": (10, ((0, 4),)),
}


@pytest.mark.parametrize("text", STEPS)
def test_steps_are_megatrons(text: str) -> None:
    """Megatron's `StepBatchsizeNumMicroBatchesCalculator`, and its count of iterations."""
    seq_length, steps = STEPS[text]
    sizes = BatchConfig(micro_batch_size=1, step_batch_size_schedule=(text,)).sizes(1, seq_length)
    assert sizes.steps == steps
    for number, (first, size) in enumerate(steps):
        assert sizes.at(first) == size
        assert not number or sizes.at(first - 1) == steps[number - 1][1]
    assert (sizes.largest, sizes.final) == (max(size for _, size in steps), steps[-1][1])


@given(stepped(), draw.integers(0, 900))
def test_iterations_within_steps_are_megatrons(sizes: BatchSizes, samples: int) -> None:
    iterations = consumed = 0
    while consumed < samples:
        consumed += next(size for first, size in reversed(sizes.steps) if consumed >= first)
        iterations += 1
    assert sizes.iterations_within(samples) == iterations


def test_a_schedule_of_too_many_steps_is_refused() -> None:
    text = " ".join(f"{10 * step}:2" for step in range(10_001))
    with pytest.raises(ConfigError, match="10,001 steps, more than 10,000"):
        BatchConfig(micro_batch_size=2, step_batch_size_schedule=(text,)).sizes(1, 10)


@pytest.mark.parametrize(
    ("given", "rows_and_number"),
    [
        ({}, (2, 4)),
        ({"global_batch_size": None, "step_batch_size_schedule": ("0:32", "90:8")}, (2, 8)),
        ({"eval_global_batch_size": 8}, (2, 2)),
        ({"eval_micro_batch_size": 8}, (8, 1)),
        ({"eval_global_batch_size": 24, "eval_micro_batch_size": 3}, (3, 4)),
    ],
)
def test_the_batch_of_evaluations(given: dict[str, object], rows_and_number: tuple[int, int]) -> None:
    batch = BatchConfig(**{"micro_batch_size": 2, "global_batch_size": 16, **given})
    assert batch.evaluation(2, 10) == rows_and_number


def test_a_constant_size() -> None:
    sizes = BatchConfig(micro_batch_size=2, global_batch_size=8).sizes(2, 10)
    assert sizes == BatchSizes.constant(8)
    assert [sizes.at(consumed) for consumed in (0, 5, 10**9)] == [8, 8, 8]
    assert (sizes.consumed_after(3, 5), sizes.iterations_within(31)) == (29, 3)
    assert BatchConfig(micro_batch_size=3).sizes(2, 10) == BatchSizes.constant(6)


def test_the_section_gives_its_ramp() -> None:
    batch = BatchConfig(micro_batch_size=2, global_batch_size=16, rampup_batch_size=(4, 4, 100))
    assert batch.sizes(2, 10) == BatchSizes.on_ramp(start=4, increment=4, final=16, samples=100)


@given(any_sizes, draw.integers(0, 200))
def test_iterations_until_are_the_first_that_reach_the_samples(sizes: BatchSizes, samples: int) -> None:
    iterations = sizes.iterations_until(samples)
    assert sizes.consumed_after(iterations) >= samples
    assert not iterations or sizes.consumed_after(iterations - 1) < samples


def test_a_ramp_of_any_length_is_counted_at_once() -> None:
    sizes = BatchSizes.on_ramp(start=1, increment=1, final=1000, samples=10**13)
    assert sizes.iterations_within(10) == 11 and sizes.iterations_until(10) == 10
    whole = sizes.iterations_until(10**13)
    assert 10**13 // 1000 < whole < 10**13 and sizes.consumed_after(whole) >= 10**13 > sizes.consumed_after(whole - 1)


MODEL = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --micro-batch-size 2 --lr 1e-3"


def test_steps_of_a_command_line() -> None:
    words = "--train-iters 9 --step-batch-size-schedule 0:8 1.6K:64 --global-batch-size 64 --data-path corpus"
    assert parse_arguments(f"{MODEL} {words}".split()).batch_sizes(4).steps == ((0, 8), (200, 64))
