"""Values that jump above those of the iterations before."""

from collections import deque
from collections.abc import Callable
from math import isfinite
from statistics import median
from typing import Literal, NamedTuple

from megatron_terapipe.config.training.numbers import NumbersConfig
from megatron_terapipe.errors import NumbersError

WINDOW = 100
"""Values of which the bound is made."""

LEAST_VALUES = 20
"""Values below which there is no bound: the spread of fewer says little."""

SPREADS = 7.0
"""Spreads above the median from which on a value is a spike. OLMo 2 (arXiv 2501.00656, section 3.1) counts losses that
are 7 standard deviations from the mean of those before."""

SPREAD_OF_NORMAL = 1.4826
"""Standard deviation over median absolute deviation of normal values (Rousseeuw and Croux 1993, equation 1.2). Unlike
the former, the latter does not grow with the spikes themselves."""

LEAST_SPIKY_LOSS, LEAST_LARGE_GRADS = 1.07, 3.0
"""Parts of the median that a spike is at least. Losses of many iterations are nearly the same; norms never are."""

Policy = Literal["note", "stop", "ignore"]
"""What follows from a spike."""


class SpikeWatch:
    """Says of each value whether it is a spike: far above the median of the values before.

    Args:
        least_ratio: part of the median that a spike is at least, however small the spread.
    """

    def __init__(self, least_ratio: float) -> None:
        self._least_ratio = least_ratio
        self._values: deque[float] = deque(maxlen=WINDOW)

    def bound(self) -> float | None:
        """Return the value above which the next one is a spike; None as long as too few are known."""
        if len(self._values) < LEAST_VALUES:
            return None
        middle = median(self._values)
        spread = SPREAD_OF_NORMAL * median(abs(value - middle) for value in self._values)
        return max(middle + SPREADS * spread, middle * self._least_ratio)

    def is_spike(self, value: float) -> bool:
        """Whether a finite value is above the bound; it then counts among those before the next."""
        bound = self.bound()
        self._values.append(value)
        return bound is not None and value > bound


class Spikes(NamedTuple):
    """Spikes of an iteration."""

    spiky_loss: bool
    """Whether its loss is one."""
    large_grads: bool
    """Whether the norm of its gradient is."""
    lines: tuple[str, ...]
    """Each in words, for the log."""
    stops: bool
    """Whether the run is to end."""

    def tell(self, note: Callable[[str], None]) -> None:
        """Note the spikes, or end the run.

        Raises:
            NumbersError: if the run is to end.
        """
        if self.stops:
            raise NumbersError(
                f"{'; '.join(self.lines)}: go on from a checkpoint before it, with a lower --lr or another --seed, or "
                "let it be noted only"
            )
        for line in self.lines:
            note(f" warning: {line}")


class SpikeGuard:
    """Watches the loss and the norm of the gradient of each iteration.

    Args:
        config: the section that says what follows from a spike.
    """

    def __init__(self, config: NumbersConfig) -> None:
        self._loss = SpikeWatch(LEAST_SPIKY_LOSS), config.spiky_loss
        self._norm = SpikeWatch(LEAST_LARGE_GRADS), config.large_grads

    def look(self, iteration: int, loss: float, grad_norm: float | None) -> Spikes:
        """Return the spikes of an iteration. What is no number is none.

        Args:
            grad_norm: norm of its gradient; None if its update was skipped.
        """
        loss_line = _line(*self._loss, f"the loss of iteration {iteration}", loss)
        norm_line = _line(*self._norm, f"the gradient norm of iteration {iteration}", grad_norm)
        stopping = [
            line for line, (_, policy) in ((loss_line, self._loss), (norm_line, self._norm)) if policy == "stop"
        ]
        lines = tuple(line for line in (loss_line, norm_line) if line)
        return Spikes(bool(loss_line), bool(norm_line), lines, stops=any(stopping))


def _line(watch: SpikeWatch, policy: Policy, what: str, value: float | None) -> str:
    """Say that a value is a spike; nothing if it is none, or nobody wants to know."""
    if policy == "ignore" or value is None or not isfinite(value):
        return ""
    bound = watch.bound()
    if not watch.is_spike(value):
        return ""
    return f"{what} is {value:.4g}, above {bound:.4g}, the bound by those before it"
