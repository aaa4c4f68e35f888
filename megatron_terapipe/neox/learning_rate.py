"""Settings of the learning rate over time."""

from dataclasses import dataclass

from megatron_terapipe.arguments.megatron_flags.unsupported_flags import TRAINING
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.neox.conversion import Conversion, as_number


@dataclass(frozen=True, kw_only=True, slots=True)
class Decay:
    """A decay as the trainer takes it."""

    end: int
    """Iteration at which the learning rate is `min_lr`."""
    warmup_fraction: float
    """Iterations of the rise, as a share of those."""
    exact: bool = True
    """Whether the shape is NeoX's to the last digit."""


def convert_learning_rate(conversion: Conversion) -> None:
    """Convert rise and decay.

    Raises:
        ConfigError: if the end of the decay is given twice.
    """
    style = conversion.take("lr_decay_style", "linear")
    lowest = _lowest(conversion)
    if style not in ("constant", "linear", "cosine"):
        conversion.refuse(f"lr_decay_style {style}", "it can be constant, linear or cosine", TRAINING)
    conversion.flag("--lr-decay-style", style)
    conversion.flag("--min-lr", lowest)
    iterations, end = conversion.count("train_iters"), _end(conversion)
    last = end or iterations
    warmup = _warmup(conversion, last)
    if style == "linear" and lowest and last is not None:
        decay = cut_off(last, warmup, highest=_highest(conversion), lowest=lowest)
        conversion.flag("--lr-decay-iters", decay.end)
        conversion.flag("--lr-warmup-fraction", repr(decay.warmup_fraction))
        if not decay.exact:
            reason = f"min_lr is reached within half an iteration of where NeoX reaches it, at {decay.end}"
            conversion.remark("lr_decay_style", reason)
        return
    if end is not None:
        conversion.flag("--lr-decay-iters", end)
    conversion.flag("--lr-warmup-fraction", warmup)
    if style == "cosine" and end is not None and iterations is not None and end < iterations:
        conversion.remark("lr_decay_iters", f"the rate stays at min_lr after {end}; NeoX's cosine rises again")


def cut_off(last: int, warmup: float, *, highest: float, lowest: float) -> Decay:
    """Return the decay that equals NeoX's linear one, which aims at 0 and is cut off at `min_lr`.

    NeoX's rate falls from its peak at iteration W on a line to 0 at iteration E. It has come down to the lowest rate at
    W + (E - W)(1 - lowest / highest), where the trainer's line ends.
    """
    rise = warmup * last
    reached = rise + (last - rise) * (1 - lowest / highest)
    end = max(1, round(reached))
    return Decay(end=end, warmup_fraction=rise / end, exact=abs(end - reached) <= 1e-9 * last)


def _end(conversion: Conversion) -> int | None:
    """Return the iteration at which the decay ends; None if it is the last one."""
    end, fraction = conversion.count("lr_decay_iters"), conversion.number("lr_decay_fraction")
    iterations = conversion.count("train_iters")
    if end is not None and fraction is not None:
        raise ConfigError(f"lr_decay_iters {end} and lr_decay_fraction {fraction} both end the decay: remove one")
    if fraction is not None and iterations is not None:
        return int(fraction * iterations)
    return end


def _warmup(conversion: Conversion, last: int | None) -> float:
    """Return the share of the decay that the rate rises in. Files of Llemma give its iterations."""
    fraction, rise = conversion.number("warmup"), conversion.number("warmup_iters")
    if fraction is not None and rise is not None:
        raise ConfigError(f"warmup {fraction} and warmup_iters {rise} both say how long the rate rises: remove one")
    if rise is not None and last:
        return float(rise / last)
    return 0.01 if fraction is None else float(fraction)


def _lowest(conversion: Conversion) -> float:
    """Return the lowest rate. Files of Llemma give it as a share of the highest."""
    rate, share = conversion.number("min_lr"), conversion.number("decay_lr_to")
    if rate is not None and share is not None:
        raise ConfigError(f"min_lr {rate} and decay_lr_to {share} both give the lowest rate: remove one")
    return float(rate or 0.0 if share is None else share * _highest(conversion))


def _highest(conversion: Conversion) -> float:
    params = conversion.section("optimizer").get("params") or {}
    return float(as_number("optimizer.params.lr", params.get("lr", 0.001)))
