"""The section of DeepSpeed's own settings."""

from dataclasses import dataclass

from megatron_terapipe.config.fields.options import check_bounds, option

BUCKET_ELEMENTS = 50_000_000
"""Elements of ZeRO's buckets: DeepSpeed's default of 5e8 sets 2 GB aside on every rank, even for a toy on a CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepSpeedConfig:
    """DeepSpeed.

    Raises:
        ConfigError: if a value is out of range.
    """

    deepspeed: bool = False
    """Accepted for scripts that pass it. Training always runs on DeepSpeed."""

    deepspeed_config: str | None = option(None, metavar="FILE")
    """JSON file with further DeepSpeed settings. `auto` leaves a setting to the trainer. A setting that contradicts a
    flag is an error."""

    zero_reduce_bucket_size: int | None = option(None, least=1, most=10**12)
    """Elements of gradients that ZeRO reduces at a time. Default: 50 million."""

    zero_allgather_bucket_size: int | None = option(None, least=1, most=10**12)
    """Elements of weights that ZeRO gathers at a time. Default: 50 million."""

    zero_reduce_scatter: bool = False
    """Use ZeRO's reduce-scatter, DeepSpeed's default. A DeepSpeed file that switches it off is an error."""

    zero_contiguous_gradients: bool = option(False, aliases=("--zero-contigious-gradients",))
    """Let ZeRO copy gradients into one buffer as they are computed."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_bounds(self)
