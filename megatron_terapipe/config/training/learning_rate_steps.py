"""How long the learning rate rises and decays, in the unit in which training is counted."""

from dataclasses import dataclass

from megatron_terapipe.config.training.optimizer import OptimizerConfig
from megatron_terapipe.config.training.training import TrainingConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningRateSteps:
    """Lengths of the warmup and of the whole, in iterations or in samples."""

    warmup: float
    """Steps of the rise; they need not be whole where a fraction or tokens say them."""

    decay: float
    """Step at which the decay ends."""

    @classmethod
    def of(cls, optimizer: OptimizerConfig, training: TrainingConfig, *, tokens_per_step: int) -> "LearningRateSteps":
        """Return the lengths, whether they are given in steps, as a fraction, or in tokens.

        Args:
            tokens_per_step: tokens of an iteration or of a sample, whichever training is counted in.
        """
        in_samples = training.unit == "samples"
        decay: float = (optimizer.lr_decay_samples if in_samples else optimizer.lr_decay_iters) or training.length
        if optimizer.lr_decay_tokens is not None:
            decay = optimizer.lr_decay_tokens / tokens_per_step
        warmup: float = optimizer.lr_warmup_samples if in_samples else optimizer.lr_warmup_iters
        if optimizer.lr_warmup_fraction is not None:
            warmup = optimizer.lr_warmup_fraction * decay
        if optimizer.lr_warmup_tokens is not None:
            warmup = optimizer.lr_warmup_tokens / tokens_per_step
        return cls(warmup=warmup, decay=decay)
