"""The section that says how long training lasts, from which seed, and what it recomputes."""

from dataclasses import dataclass
from typing import Literal

from megatron_terapipe.config.options import check_choices, check_not_negative, check_positive, option


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """Training: how long, from which seed, and what to recompute.

    Raises:
        ConfigError: if a value is out of range.
    """

    train_iters: int
    """Optimizer steps of the whole run."""

    seed: int = 1234
    """Seed of the weights and of the order of the data."""

    exit_interval: int | None = None
    """Stop after the next iteration that is a multiple of this."""

    recompute_granularity: Literal["none", "full"] = option(
        "none",
        shorthands=dict.fromkeys(
            (
                "--recompute-activations",
                "--checkpoint-activations",
                "--deepspeed-activation-checkpointing",
            ),
            "full",
        ),
    )
    """Activations to recompute in the backward instead of keeping: `none`, or `full` for whole layers."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_choices(self)
        check_positive(self, "train_iters", "exit_interval")
        check_not_negative(self, "seed")
