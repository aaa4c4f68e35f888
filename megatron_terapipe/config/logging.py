"""The section that says what a run reports and when it evaluates."""

from dataclasses import dataclass

from megatron_terapipe.config.options import check_not_negative, check_positive, option


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggingConfig:
    """Logging and evaluation.

    Raises:
        ConfigError: if a value is out of range.
    """

    log_interval: int = 10
    """Iterations between lines of the log."""

    eval_interval: int = 1000
    """Iterations between evaluations on the validation data."""

    eval_iters: int = 10
    """Global batches of one evaluation. 0 = never evaluate."""

    metrics_file: str | None = option(None, metavar="FILE")
    """File to append one JSON object per iteration and evaluation to."""

    timeline: str | None = option(None, metavar="DIR")
    """Directory to write the timeline of one iteration to, as it was executed. Left out, none is written."""

    timeline_iteration: int = 3
    """Iteration whose timeline is written. The first ones are slower than the rest."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_positive(self, "log_interval", "eval_interval", "timeline_iteration")
        check_not_negative(self, "eval_iters")
