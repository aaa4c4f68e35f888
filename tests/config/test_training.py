"""Batch sizes over a run, and its length."""

import pytest
from hypothesis import given
from hypothesis import strategies as draw

from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.config import BatchConfig, Config
from megatron_terapipe.config.batch import BatchSizes
from megatron_terapipe.errors import ConfigError


@draw.composite
def ramps(draw_from) -> BatchSizes:
    start, increment = draw_from(draw.integers(1, 20)), draw_from(draw.integers(1, 20))
    steps = draw_from(draw.integers(1, 12))
    return BatchSizes(
        start=start,
        increment=increment,
        final=start + steps * increment,
        ramp_samples=draw_from(draw.integers(1, 2000)),
    )


@given(ramps(), draw.integers(0, 3000))
def test_the_size_is_megatrons(sizes: BatchSizes, consumed: int) -> None:
    calculators = pytest.importorskip("megatron.core.num_microbatches_calculator")
    theirs = calculators.RampupBatchsizeNumMicroBatchesCalculator(
        sizes.final, 1, 1, False, 1, sizes.start, sizes.increment, sizes.ramp_samples
    )
    theirs.update(consumed, consistency_check=False)
    assert sizes.at(consumed) == theirs.get_current_global_batch_size()


@given(ramps())
def test_it_never_falls_and_ends_at_the_last(sizes: BatchSizes) -> None:
    seen = [sizes.at(consumed) for consumed in range(sizes.ramp_samples + 2)]
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (sizes.start, sizes.final)


@given(ramps(), draw.integers(0, 60), draw.integers(0, 60))
def test_a_run_in_two_parts_consumes_as_many_samples(sizes: BatchSizes, first: int, second: int) -> None:
    consumed = 0
    for _ in range(first + second):
        consumed += sizes.at(consumed)
    assert sizes.consumed_after(first + second) == consumed
    assert sizes.consumed_after(second, sizes.consumed_after(first)) == consumed


@given(ramps(), draw.integers(0, 5000))
def test_iterations_within_samples_are_megatrons(sizes: BatchSizes, samples: int) -> None:
    """Megatron's `update_train_iters`: it counts the ramp iteration by iteration, then divides the rest."""
    iterations = consumed = 0
    while consumed <= sizes.ramp_samples and consumed <= samples:
        consumed += sizes.at(consumed)
        iterations += 1
    if samples > consumed:
        iterations += (samples - consumed) // sizes.final
    assert sizes.iterations_within(samples) == iterations


def test_a_constant_size() -> None:
    sizes = BatchConfig(micro_batch_size=2, global_batch_size=8).sizes(2)
    assert sizes == BatchSizes.constant(8)
    assert [sizes.at(consumed) for consumed in (0, 5, 10**9)] == [8, 8, 8]
    assert (sizes.consumed_after(3, 5), sizes.iterations_within(31)) == (29, 3)
    assert BatchConfig(micro_batch_size=3).sizes(2) == BatchSizes.constant(6)


def test_the_section_gives_its_ramp() -> None:
    batch = BatchConfig(micro_batch_size=2, global_batch_size=16, rampup_batch_size=(4, 4, 100))
    assert batch.sizes(2) == BatchSizes(start=4, increment=4, final=16, ramp_samples=100)
    assert batch.num_micro_batches(2) == 4


@pytest.mark.parametrize(
    ("ramp", "final", "data_parallel_size", "parts"),
    [
        ((4, 4), 16, 1, "--rampup-batch-size 4 4 "),
        ((4, 0, 9), 16, 1, "--rampup-batch-size 4 0 9 "),
        ((4, 4, 9), None, 1, "--rampup-batch-size 4 4 9 has no effect without --global-batch-size"),
        ((4, 8, 9), 16, 1, "--global-batch-size 16 in steps of 8: give 20, "),
        ((16, 4, 9), 16, 1, "--global-batch-size 16 in steps of 4: give 20, "),
        ((3, 1, 9), 16, 1, "--rampup-batch-size START 3 is not a multiple of --micro-batch-size 2: "),
        ((4, 2, 9), 16, 2, "INCREMENT 2 is not a multiple of --micro-batch-size 2 x data-parallel size 2 = 4"),
        ((2, 2, 10**13), 2 * 10**8, 1, "99,999,999 increments, more than 10,000"),
    ],
)
def test_ramps_that_are_refused(ramp: tuple[int, ...], final: int | None, data_parallel_size: int, parts: str) -> None:
    with pytest.raises(ConfigError) as caught:
        BatchConfig(micro_batch_size=2, global_batch_size=final, rampup_batch_size=ramp).sizes(data_parallel_size)
    assert parts in str(caught.value) and "\n" not in str(caught.value)


@given(final=draw.integers(1, 8), steps=draw.integers(0, 3), ramp=draw.integers(1, 60), samples=draw.integers(0, 200))
def test_iterations_until_are_the_first_that_reach_the_samples(final: int, steps: int, ramp: int, samples: int) -> None:
    sizes = BatchSizes(final=final + steps, start=final, increment=int(steps > 0), ramp_samples=ramp if steps else 0)
    iterations = sizes.iterations_until(samples)
    assert sizes.consumed_after(iterations) >= samples
    assert not iterations or sizes.consumed_after(iterations - 1) < samples


def test_a_ramp_of_any_length_is_counted_at_once() -> None:
    sizes = BatchSizes(start=1, increment=1, final=1000, ramp_samples=10**13)
    assert sizes.iterations_within(10) == 11 and sizes.iterations_until(10) == 10
    whole = sizes.iterations_until(10**13)
    assert 10**13 // 1000 < whole < 10**13 and sizes.consumed_after(whole) >= 10**13 > sizes.consumed_after(whole - 1)


MODEL = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --micro-batch-size 2 --lr 1e-3"


def parse(words: str) -> Config:
    return parse_arguments(f"{MODEL} --data-path corpus {words}".split())


def test_lengths() -> None:
    for words, unit, length, tokens in (
        ("--train-iters 7", "iters", 7, None),
        ("--train-samples 9", "samples", 9, None),
        ("--train-tokens 72", "samples", 9, None),
        ("--train-tokens 70 --train-samples 90 --lr-decay-tokens 70 --lr-warmup-tokens 15", "samples", 90, 70),
    ):
        training = parse(words).training
        assert (training.unit, training.length, training.train_tokens) == (unit, length, tokens)


def test_megatrons_ramp_parses() -> None:
    config = parse("--train-samples 5000 --global-batch-size 64 --rampup-batch-size 16 8 2000 --lr-decay-samples 4000")
    assert config.batch.rampup_batch_size == (16, 8, 2000)
    assert config.optimizer.lr_decay_samples == 4000
    assert (config.global_batch_size(4), config.num_micro_batches(4)) == (64, 8)
    # A flag as Megatron misspells it.
    assert parse("--train-iters 9 --no-log-learnig-rate-to-tensorboard").logging.no_log_learning_rate_to_tensorboard
