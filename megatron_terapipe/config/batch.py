"""The section of the batch, and the global batch size over a run: constant, or rising on Megatron's ramp."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from megatron_terapipe.config.options import check, option
from megatron_terapipe.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSizes:
    """Global batch size by the number of samples consumed.

    On a ramp it rises from `start` to `final` in equal increments, each of which lasts equally many samples.

    Example:
        >>> sizes = BatchSizes(final=8, start=4, increment=2, ramp_samples=16)
        >>> [sizes.at(consumed) for consumed in (0, 7, 8, 15, 16, 1000)]
        [4, 4, 6, 6, 8, 8]
    """

    final: int
    """Samples of an iteration once the ramp is over."""

    start: int
    """Samples of the first iteration."""

    increment: int = 0
    """Samples that each step of the ramp adds; 0 = the size is constant."""

    ramp_samples: int = 0
    """Samples consumed on the ramp."""

    @classmethod
    def constant(cls, size: int) -> "BatchSizes":
        """Return a size that never changes."""
        return cls(final=size, start=size)

    @property
    def is_constant(self) -> bool:
        """Whether every iteration has the same size."""
        return self.increment == 0

    def at(self, consumed_samples: int) -> int:
        """Return the size of the iteration that follows `consumed_samples` samples."""
        if self.is_constant or consumed_samples > self.ramp_samples:
            return self.final
        # In floating point and cut off, as Megatron divides: a ramp need not be a multiple of its steps.
        samples_per_step = self.ramp_samples / ((self.final - self.start) // self.increment)
        return self.start + int(consumed_samples / samples_per_step) * self.increment

    def consumed_after(self, iterations: int, consumed_samples: int = 0) -> int:
        """Return the samples consumed once `iterations` more iterations are done."""
        for size, number in self._stretches(consumed_samples):
            number = min(number, iterations)
            consumed_samples += number * size
            iterations -= number
            if not iterations:
                break
        return consumed_samples + iterations * self.final

    def iterations_within(self, samples: int) -> int:
        """Return how many iterations a run of `samples` samples has; past the ramp a part of one is dropped.

        On the ramp the iteration that reaches the last sample is counted, as Megatron counts it.
        """
        iterations = consumed = 0
        for size, number in self._stretches(0):
            if consumed > samples:
                break
            number = min(number, (samples - consumed) // size + 1)
            consumed += number * size
            iterations += number
        return iterations + max(0, samples - consumed) // self.final

    def iterations_until(self, samples: int) -> int:
        """Return after how many iterations `samples` samples are consumed; the last may consume more."""
        iterations = consumed = 0
        for size, number in self._stretches(0):
            number = min(number, max(0, -(-(samples - consumed) // size)))
            consumed += number * size
            iterations += number
        return iterations + max(0, -(-(samples - consumed) // self.final))

    def _stretches(self, consumed_samples: int) -> Iterator[tuple[int, int]]:
        """Yield size and number of iterations of equal size, until the ramp is over."""
        while not self._is_final(consumed_samples):
            size = self.at(consumed_samples)
            # At most as many as the ramp has room for, and fewer where a larger size begins before.
            most = (self.ramp_samples - consumed_samples) // size + 1
            grows = partial(self._is_above, size, consumed_samples)
            number = 1 + bisect_left(range(1, most), True, key=grows)
            yield size, number
            consumed_samples += number * size

    def _is_above(self, size: int, consumed_samples: int, iterations: int) -> bool:
        """Whether the size is above `size` after so many more iterations of it."""
        return self.at(consumed_samples + iterations * size) > size

    def _is_final(self, consumed_samples: int) -> bool:
        """Whether the ramp is over; Megatron counts its very last sample to it."""
        return self.is_constant or consumed_samples > self.ramp_samples


MOST_SEQUENCES = 10**9
"""Sequences of one optimizer step at most."""

MOST_INCREMENTS = 10_000
"""Increments of a ramp at most; the samples that a run consumes on it are computed increment by increment."""


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

    def __post_init__(self) -> None:
        """Check the sizes and the ramp between them."""
        check(self)
        self._check_ramp()
        self._check_multiples(self.micro_batch_size, f"--micro-batch-size {self.micro_batch_size}")

    def num_micro_batches(self, data_parallel_size: int) -> int:
        """Micro-batches of one data-parallel rank in one optimizer step, the last on a ramp."""
        return self.sizes(data_parallel_size).final // (self.micro_batch_size * data_parallel_size)

    def sizes(self, data_parallel_size: int) -> BatchSizes:
        """Global batch sizes of the run."""
        sequences = self.micro_batch_size * data_parallel_size
        self._check_multiples(
            sequences,
            f"--micro-batch-size {self.micro_batch_size} x data-parallel size {data_parallel_size} = {sequences}",
        )
        if self.rampup_batch_size is None:
            return BatchSizes.constant(self.global_batch_size or sequences * (self.gradient_accumulation_steps or 1))
        assert self.global_batch_size is not None
        start, increment, ramp_samples = self.rampup_batch_size
        return BatchSizes(final=self.global_batch_size, start=start, increment=increment, ramp_samples=ramp_samples)

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

    def _check_multiples(self, of: int, described: str) -> None:
        sizes = [("--global-batch-size", self.global_batch_size)]
        if self.rampup_batch_size is not None:
            sizes += zip(
                ("--rampup-batch-size START", "--rampup-batch-size INCREMENT"), self.rampup_batch_size, strict=False
            )
        for name, size in sizes:
            if size is not None and size % of:
                raise ConfigError(
                    f"{name} {size} is not a multiple of {described}: give a multiple, such as {-(-size // of) * of}"
                )
