"""The progress of a run."""

from dataclasses import dataclass, replace
from typing import Literal, Self


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Iterations and samples done, over all runs. An iteration whose update fp16 skipped counts like any other."""

    iteration: int = 0
    """Iterations done."""

    consumed_samples: int = 0
    """Samples read in them."""

    skipped_iterations: int = 0
    """Iterations that did not update the weights."""

    skipped_samples: int = 0
    """Samples read in those."""

    def after(self, batch_size: int, *, skipped: bool = False) -> Self:
        """Return the progress after one more iteration.

        Args:
            skipped: whether its update was skipped.
        """
        return replace(
            self,
            iteration=self.iteration + 1,
            consumed_samples=self.consumed_samples + batch_size,
            skipped_iterations=self.skipped_iterations + skipped,
            skipped_samples=self.skipped_samples + skipped * batch_size,
        )

    def schedule_step(self, unit: Literal["iters", "samples"]) -> int:
        """Return the step of the learning rate's schedule, which as in Megatron only an update moves on."""
        if unit == "iters":
            return self.iteration - self.skipped_iterations
        return self.consumed_samples - self.skipped_samples
