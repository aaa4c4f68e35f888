"""The section of number types and loss scaling."""

from dataclasses import dataclass
from math import log2
from typing import Literal

from megatron_terapipe.config.fields.options import check_bounds, option
from megatron_terapipe.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionConfig:
    """Precision: fp32 unless one of the flags says otherwise.

    Raises:
        ConfigError: if two types are asked for, or a value is out of range.
    """

    fp16: bool = False
    """Train in fp16, with a scaled loss. Needs ZeRO stage 1."""

    bf16: bool = False
    """Train in bf16."""

    loss_scale: float | None = option(None, above=0, most=1e36)
    """Fixed scale of the loss in fp16. Default: the scale adapts."""

    # Megatron starts at 2**32, but the largest fp16 number is 65504: the first iterations would all be skipped.
    initial_loss_scale: float = option(65536.0, above=0, most=1e36)
    """First adaptive loss scale, a power of 2."""

    min_loss_scale: float = option(1.0, above=0, most=1e36)
    """Smallest adaptive loss scale, a whole number."""

    loss_scale_window: int = option(1000, least=1, most=10**9)
    """Iterations without overflow after which the loss scale doubles."""

    hysteresis: int = option(2, least=1, most=10**9)
    """Overflows before the loss scale halves."""

    accumulate_allreduce_grads_in_fp32: bool = False
    """Sum and reduce gradients in fp32. In bf16 with ZeRO stage 1 this is always so."""

    def __post_init__(self) -> None:
        """Check the pair and the ranges."""
        if self.fp16 and self.bf16:
            raise ConfigError("--fp16 and --bf16 exclude each other: drop one of them")
        check_bounds(self)
        if not log2(self.initial_loss_scale).is_integer():
            raise ConfigError(
                f"--initial-loss-scale {self.initial_loss_scale} is not a power of 2: give one, such as 65536"
            )
        if not self.min_loss_scale.is_integer():
            raise ConfigError(f"--min-loss-scale {self.min_loss_scale} is not a whole number: give one, such as 1")

    @property
    def needs_zero(self) -> bool:
        """Whether DeepSpeed trains so only under ZeRO 1.

        Without ZeRO, DeepSpeed 0.19 leaves the loss of fp16 unscaled, yet divides the gradients by the scale, and adds
        gradients of bf16 up in bf16.
        """
        return self.fp16 or (self.bf16 and self.accumulate_allreduce_grads_in_fp32)

    @property
    def dtype(self) -> Literal["fp32", "fp16", "bf16"]:
        """Type of the parameters and of what flows between stages."""
        return "fp16" if self.fp16 else "bf16" if self.bf16 else "fp32"
