"""The global batch size over a run: constant, or rising on Megatron's ramp."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSizes:
    """Global batch size by the samples consumed so far.

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
            number, enough = 0, (self.ramp_samples - consumed_samples) // size + 1
            while enough - number > 1:
                middle = (number + enough) // 2
                if self.at(consumed_samples + middle * size) == size:
                    number = middle
                else:
                    enough = middle
            yield size, enough
            consumed_samples += enough * size

    def _is_final(self, consumed_samples: int) -> bool:
        """Whether the ramp is over; Megatron counts its very last sample to it."""
        return self.is_constant or consumed_samples > self.ramp_samples
