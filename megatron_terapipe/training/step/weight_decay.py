"""The weight decay at every step."""

from dataclasses import dataclass
from math import cos, pi

from megatron_terapipe.config.training.optimizer import OptimizerConfig
from megatron_terapipe.config.training.training import TrainingConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightDecaySchedule:
    """Constant, or rising from `start` to `end` in one of Megatron's shapes.

    Example:
        >>> schedule = WeightDecaySchedule(start=0.0, end=0.4, style="linear", steps=4)
        >>> [schedule.at(step) for step in range(6)]
        [0.0, 0.1, 0.2, 0.30000000000000004, 0.4, 0.4]
    """

    start: float
    """Weight decay of the first update."""

    end: float
    """Weight decay after `steps` steps, and from there on."""

    style: str
    """Shape of the rise: constant, linear or cosine."""

    steps: int
    """Iterations or samples of the rise: those of the whole training."""

    @classmethod
    def from_config(cls, optimizer: OptimizerConfig, training: TrainingConfig) -> "WeightDecaySchedule":
        """Read the schedule from the sections that decide it."""
        constant, style = optimizer.weight_decay, optimizer.weight_decay_incr_style
        start, end = optimizer.start_weight_decay, optimizer.end_weight_decay
        return cls(
            start=constant if start is None else start,
            end=constant if end is None else end,
            style=style,
            steps=training.length,
        )

    def at(self, step: int) -> float:
        """Weight decay of the update that follows `step` completed steps."""
        if self.style == "constant" or step > self.steps:
            return self.end
        progress = step / self.steps
        risen = progress if self.style == "linear" else (1 + cos(pi * (1 - progress))) / 2
        return self.start + risen * (self.end - self.start)
