"""The learning rate at every iteration."""

from dataclasses import dataclass
from math import cos, pi, sqrt

from megatron_terapipe.config.optimizer import OptimizerConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningRateSchedule:
    """Rise on a line from 0 to `max_lr`, then decay to `min_lr` in one of Megatron's shapes.

    Example:
        >>> schedule = LearningRateSchedule(
        ...     max_lr=1.0, min_lr=0.0, decay_style="linear", warmup_iters=2, decay_iters=6
        ... )
        >>> [schedule.at(iteration) for iteration in range(7)]
        [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """

    max_lr: float
    """Highest learning rate."""

    min_lr: float
    """Learning rate at the end of the decay, and from there on."""

    decay_style: str
    """Shape of the decay: constant, linear, cosine or inverse-square-root."""

    warmup_iters: int
    """Iterations of the rise."""

    decay_iters: int
    """Iteration at which the decay ends."""

    @classmethod
    def from_config(cls, optimizer: OptimizerConfig, train_iters: int) -> "LearningRateSchedule":
        """Read the schedule off the optimizer section.

        Args:
            optimizer: the section.
            train_iters: iterations of the whole run, where the decay ends unless the section says otherwise.
        """
        decay_iters = optimizer.lr_decay_iters or train_iters
        warmup_iters = optimizer.lr_warmup_iters
        if optimizer.lr_warmup_fraction is not None:
            warmup_iters = int(optimizer.lr_warmup_fraction * decay_iters)
        return cls(
            max_lr=optimizer.lr,
            min_lr=optimizer.min_lr,
            decay_style=optimizer.lr_decay_style,
            warmup_iters=warmup_iters,
            decay_iters=decay_iters,
        )

    def at(self, iteration: int) -> float:
        """Learning rate of the update that follows `iteration` completed iterations.

        As in Megatron, the first update of a run is `at(0)`, which is 0 if there is a warmup.
        """
        if iteration < self.warmup_iters:
            return self.max_lr * iteration / self.warmup_iters
        if self.decay_style == "constant":
            return self.max_lr
        if iteration > self.decay_iters:
            return self.min_lr
        if self.decay_style == "inverse-square-root":
            # Equal to max_lr where the warmup ends, whatever its length.
            decayed = self.max_lr * sqrt(max(self.warmup_iters, 1) / max(iteration, 1))
            return max(self.min_lr, decayed)
        progress = (iteration - self.warmup_iters) / (self.decay_iters - self.warmup_iters)
        remaining = 1 - progress if self.decay_style == "linear" else (1 + cos(pi * progress)) / 2
        return self.min_lr + remaining * (self.max_lr - self.min_lr)
