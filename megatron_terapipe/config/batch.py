"""The section of the batch, and the global batch size over a run: constant, on Megatron's ramp, or in its steps."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from typing import NamedTuple

from megatron_terapipe.config.options import check, option
from megatron_terapipe.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSizes:
    """Global batch size by the number of samples consumed.

    Example:
        >>> sizes = BatchSizes.on_ramp(start=4, increment=2, samples=16, final=8)
        >>> [sizes.at(consumed) for consumed in (0, 7, 8, 15, 16, 1000)]
        [4, 4, 6, 6, 8, 8]
    """

    steps: tuple[tuple[int, int], ...]
    """(samples consumed before it, samples of an iteration) of each step, rising from 0."""

    counts_part: bool = False
    """Whether an iteration that the samples of a run fill only in part is counted in the last step, too."""

    @classmethod
    def constant(cls, size: int) -> "BatchSizes":
        """Return a size that never changes."""
        return cls(steps=((0, size),))

    @classmethod
    def on_ramp(cls, *, start: int, increment: int, samples: int, final: int) -> "BatchSizes":
        """Return sizes that rise by equal increments, each of which lasts equally many of `samples` samples."""
        increments = (final - start) // increment
        each = samples / increments
        steps = {0: start}
        for number in range(1, increments + 1):
            # In floating point and cut off, as Megatron divides: a ramp need not be a multiple of its steps.
            first = max(0, int(number * each) - 1)
            while int(first / each) < number:
                first += 1
            steps[min(first, samples + 1)] = start + number * increment
        # Megatron counts the very last sample to the ramp.
        steps[samples + 1] = final
        return cls(steps=tuple(steps.items()))

    @property
    def final(self) -> int:
        """Samples of an iteration in the last step."""
        return self.steps[-1][1]

    @property
    def largest(self) -> int:
        """Samples of the largest iteration."""
        return max(size for _, size in self.steps)

    @property
    def smallest(self) -> int:
        """Samples of the smallest iteration."""
        return min(size for _, size in self.steps)

    def at(self, consumed_samples: int) -> int:
        """Return the size of the iteration that follows `consumed_samples` samples."""
        return self.steps[bisect_right(self.steps, consumed_samples, key=lambda step: step[0]) - 1][1]

    def consumed_after(self, iterations: int, consumed_samples: int = 0) -> int:
        """Return the samples consumed once `iterations` more iterations are done."""
        for size, number in self._stretches(consumed_samples):
            number = min(number, iterations)
            consumed_samples += number * size
            iterations -= number
            if not iterations:
                break
        return consumed_samples + iterations * self.final

    def iterations_within(self, samples: int, consumed: int = 0) -> int:
        """Return how many iterations follow `consumed` samples of `samples`; in the last step a part is dropped.

        On a ramp the iteration that reaches the last sample is counted, and in steps in the last one, too, as Megatron
        counts them.
        """
        if self.counts_part:
            return self.iterations_until(samples, consumed)
        iterations = 0
        for size, number in self._stretches(consumed):
            if consumed > samples:
                break
            number = min(number, (samples - consumed) // size + 1)
            consumed += number * size
            iterations += number
        return iterations + max(0, samples - consumed) // self.final

    def iterations_until(self, samples: int, consumed: int = 0) -> int:
        """Return how many iterations after `consumed` samples `samples` are reached; the last may consume more."""
        iterations = 0
        for size, number in self._stretches(consumed):
            number = min(number, max(0, -(-(samples - consumed) // size)))
            consumed += number * size
            iterations += number
        return iterations + max(0, -(-(samples - consumed) // self.final))

    def _stretches(self, consumed_samples: int) -> Iterator[tuple[int, int]]:
        """Yield size and number of iterations of equal size, until the last step."""
        for (_, size), (end, _) in pairwise(self.steps):
            if consumed_samples < end:
                number = -(-(end - consumed_samples) // size)
                yield size, number
                consumed_samples += number * size


class EvaluationBatch(NamedTuple):
    """Batch of an evaluation on each data-parallel rank."""

    micro_batch_size: int
    num_micro_batches: int


MOST_SEQUENCES = 10**9
"""Sequences of one optimizer step at most."""

MOST_INCREMENTS = 10_000
"""Increments of a ramp, or steps, at most; the samples that a run consumes are computed step by step."""

MOST_TOKENS = 10**18

SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """Batch: sequences per optimizer step."""

    micro_batch_size: int = option(least=1, most=1_000_000)
    """Sequences that pass through the pipeline together."""

    global_batch_size: int | None = option(None, least=1, most=MOST_SEQUENCES)
    """Sequences of one optimizer step, over all data-parallel ranks. Default: one micro-batch on each."""

    gradient_accumulation_steps: int | None = option(None, excludes=("global_batch_size",), least=1, most=10**9)
    """Micro-batches of each data-parallel rank in one optimizer step, instead of `--global-batch-size`."""

    rampup_batch_size: tuple[int, ...] | None = option(None, metavar="N", needs=("global_batch_size",), most=10**13)
    """Three numbers: the first global batch size, the increment, and the samples until it reaches
    `--global-batch-size`, as in `--rampup-batch-size 16 8 300000`."""

    step_batch_size_schedule: tuple[str, ...] | None = option(
        None, metavar="TOKENS:SIZE", excludes=("gradient_accumulation_steps", "rampup_batch_size")
    )
    """Global batch sizes in steps, each after the tokens consumed before it, as in `0:384 200B:768 400B:1152`; K, M, B
    and T are thousands to trillions. `--global-batch-size` may repeat the last."""

    eval_global_batch_size: int | None = option(None, least=1, most=MOST_SEQUENCES)
    """Sequences of one iteration of an evaluation. Default: as many as in the largest optimizer step."""

    eval_micro_batch_size: int | None = option(None, least=1, most=1_000_000)
    """Sequences that pass through the pipeline together in evaluations. Default: `--micro-batch-size`."""

    def __post_init__(self) -> None:
        check(self)
        self._check_ramp()
        self._check_multiples(self.micro_batch_size, f"--micro-batch-size {self.micro_batch_size}")

    def sizes(self, data_parallel_size: int, seq_length: int) -> BatchSizes:
        """Global batch sizes of a run on sequences of so many tokens."""
        sequences, words = self.micro_batch_size * data_parallel_size, self.step_batch_size_schedule
        steps = () if words is None else scheduled_steps(" ".join(words), seq_length)
        self._check_multiples(
            sequences,
            f"--micro-batch-size {self.micro_batch_size} x data-parallel size {data_parallel_size} = {sequences}",
            steps,
        )
        if steps:
            if self.global_batch_size not in (None, steps[-1][1]):
                raise ConfigError(
                    f"--global-batch-size {self.global_batch_size} contradicts --step-batch-size-schedule, which ends "
                    f"at {steps[-1][1]}: drop the former"
                )
            return BatchSizes(steps=steps, counts_part=True)
        if self.rampup_batch_size is None:
            return BatchSizes.constant(self.global_batch_size or sequences * (self.gradient_accumulation_steps or 1))
        assert self.global_batch_size is not None
        start, increment, samples = self.rampup_batch_size
        return BatchSizes.on_ramp(start=start, increment=increment, samples=samples, final=self.global_batch_size)

    def evaluation(self, data_parallel_size: int, seq_length: int) -> EvaluationBatch:
        """Batch of an evaluation on each data-parallel rank."""
        largest = self.sizes(data_parallel_size, seq_length).largest
        size, rows = self.eval_global_batch_size or largest, self.eval_micro_batch_size or self.micro_batch_size
        sequences = rows * data_parallel_size
        if size % sequences:
            of = "--eval-micro-batch-size" if self.eval_micro_batch_size else "--micro-batch-size"
            given = "" if self.eval_global_batch_size else ", the size of training,"
            raise ConfigError(
                f"--eval-global-batch-size {size}{given} is not a multiple of {of} {rows} x data-parallel size "
                f"{data_parallel_size} = {sequences}: give a multiple, such as {-(-size // sequences) * sequences}"
            )
        return EvaluationBatch(rows, size // sequences)

    def _check_ramp(self) -> None:
        if self.rampup_batch_size is None:
            return
        words = f"--rampup-batch-size {' '.join(map(str, self.rampup_batch_size))}"
        if len(self.rampup_batch_size) != 3 or min(self.rampup_batch_size) < 1:
            raise ConfigError(
                f"{words} is not three numbers above 0: give START INCREMENT SAMPLES, such as 16 8 300000"
            )
        assert self.global_batch_size is not None
        start, increment, _ = self.rampup_batch_size
        rise = self.global_batch_size - start
        if rise <= 0 or rise % increment:
            raise ConfigError(
                f"{words} does not rise to --global-batch-size {self.global_batch_size} in steps of {increment}: give "
                f"{start + max(1, -(-rise // increment)) * increment}, or another start or increment"
            )
        if rise // increment > MOST_INCREMENTS:
            raise ConfigError(
                f"{words} rises in {rise // increment:,} increments, more than {MOST_INCREMENTS:,}: give larger ones"
            )

    def _check_multiples(self, of: int, described: str, steps: Sequence[tuple[int, int]] = ()) -> None:
        sizes = [("--global-batch-size", self.global_batch_size)]
        if self.rampup_batch_size is not None:
            sizes += zip(
                ("--rampup-batch-size START", "--rampup-batch-size INCREMENT"), self.rampup_batch_size, strict=False
            )
        sizes += (("--step-batch-size-schedule: a step of", size) for _, size in steps)
        for name, size in sizes:
            if size is not None and size % of:
                raise ConfigError(
                    f"{name} {size} is not a multiple of {described}: give a multiple, such as {-(-size // of) * of}"
                )


def scheduled_steps(text: str, seq_length: int) -> tuple[tuple[int, int], ...]:
    """Return (samples, size) of each step of Megatron's text, in order.

    Args:
        seq_length: tokens of a sample.
    """
    flag, steps, words = "--step-batch-size-schedule", [], text.replace(",", " ").split()
    text = " ".join(words)[:80]
    for word in words:
        first, _, size = word.partition(":")
        tokens, samples = _whole_number(first), _whole_number(size)
        if tokens is None or samples is None or tokens > MOST_TOKENS or not 1 <= samples <= MOST_SEQUENCES:
            raise ConfigError(
                f"{flag}: {word[:80]} is not TOKENS:SIZE, with up to {MOST_TOKENS:,} tokens and 1 "
                f"to {MOST_SEQUENCES:,} sequences: write 0:384 200B:768"
            )
        steps.append((tokens // seq_length, samples))
    steps.sort(key=lambda step: step[0])
    if not steps or steps[0][0]:
        raise ConfigError(f"{flag} {text} has no step from token 0: write 0:384 200B:768")
    if len(steps) > MOST_INCREMENTS:
        raise ConfigError(f"{flag} has {len(steps):,} steps, more than {MOST_INCREMENTS:,}: give fewer")
    for (before, _), (samples, _) in pairwise(steps):
        if samples == before:
            raise ConfigError(
                f"{flag} {text} has two steps from sample {samples:,}, of {seq_length} tokens each: drop one of them"
            )
    return tuple(steps)


def _whole_number(text: str) -> int | None:
    """Return a number such as 2.4B, cut off as Megatron does; None if the text is none."""
    number, factor = text.strip().upper(), 1
    if number[-1:] in SUFFIXES:
        number, factor = number[:-1], SUFFIXES[number[-1]]
    try:
        value = float(number) * factor
    except ValueError:
        return None
    return int(value) if isfinite(value) and value >= 0 else None
