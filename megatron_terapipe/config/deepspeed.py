"""The section of DeepSpeed's own settings."""

from dataclasses import dataclass

from megatron_terapipe.config.options import option


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepSpeedConfig:
    """DeepSpeed."""

    deepspeed: bool = False
    """Accepted for scripts that pass it. Training always runs on DeepSpeed."""

    deepspeed_config: str | None = option(None, metavar="FILE")
    """JSON file with further DeepSpeed settings. One that contradicts a flag is an error."""
