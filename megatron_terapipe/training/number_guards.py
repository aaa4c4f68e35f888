"""Checks of the numbers of a run: NaN and infinity in losses, gradients and states, unequal copies, and spikes.

One number decides: the norm of the gradient of the whole model, which is computed and read anyway. A bad loss gets NaN
as its gradient, so the norm covers it. A test of each micro-batch on the host, as in Megatron-LM, would make the host
wait for the device within a step. Only after a bad norm, with the update skipped, are states scanned and the batch
computed again to find the origin.
"""

from collections import deque
from collections.abc import Callable, Iterator
from math import inf, isfinite
from typing import Any

from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from deepspeed_ext.runtime.health.states import bad_states, described, differences
from deepspeed_ext.runtime.origin import find_origin
from megatron_terapipe.config.training import NumbersConfig
from megatron_terapipe.errors import NumbersError
from megatron_terapipe.records import outlier_bound


def refuse_bad_states(engine: TokenSlicePipelineEngine, name: str, remedy: str) -> None:
    """Raise an error if weights or optimizer states are NaN or infinite; a collective operation of all ranks."""
    if found := bad_states(engine):
        raise NumbersError(f"{name} has NaN or infinity in {described(found)}: {remedy}")


def refuse_different_copies(engine: TokenSlicePipelineEngine, iteration: int, equal_after: int) -> None:
    """Raise an error if copies of weights or optimizer states differ; a collective operation of all ranks.

    Args:
        equal_after: iterations done at the last check, when the copies were equal.
    """
    if found := differences(engine):
        raise NumbersError(
            f"after iteration {iteration} copies are not equal: {described(found, '; ')}: resume from the "
            f"checkpoint of iteration {equal_after} or before, and check the devices and links of those ranks"
        )


class BadIteration(NumbersError):
    """An iteration with bad numbers whose update was not applied: the weights are as after the previous iteration."""


class RememberedBatches(Iterator[Any]):
    """Micro-batches of a rank, which keeps the last iteration's."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self.last: list[Any] = []

    def begin(self) -> None:
        """Start an iteration: remove the stored micro-batches."""
        self.last = []

    def __next__(self) -> Any:
        self.last.append(next(self._batches))
        return self.last[-1]


class BadNumbers:
    """Checks the loss of each iteration and whether its update was applied; only if they are bad, all states."""

    def __init__(self, config: NumbersConfig, engine: TokenSlicePipelineEngine, note: Callable[[str], None]) -> None:
        self._config, self._engine, self._note = config, engine, note
        self._in_a_row = 0
        self._scaler = getattr(engine.optimizer, "loss_scaler", None) if engine.fp16_enabled() else None
        if getattr(self._scaler, "dynamic", False):
            # DeepSpeed would raise an error on every rank at the lowest scale.
            self._scaler.raise_error_at_min_scale = False
        self._scaling = self._loss_scaling()

    def check(self, iteration: int, loss: float, batches: RememberedBatches) -> None:
        """Check an iteration; a collective operation of all ranks, with the same loss.

        Raises:
            BadIteration: if its loss or its gradient is NaN or infinite, and the run ends.
            NumbersError: if weights or states are, too.
        """
        applied, scaling = self._engine.was_step_applied(), self._loss_scaling()
        rescaled, self._scaling = scaling != self._scaling, scaling
        if applied and isfinite(loss):
            self._in_a_row = 0
            return
        if rescaled and isfinite(loss):
            return
        if self._config.bad_numbers == "ignore":
            return
        at_scale = "" if scaling is None else f" at the lowest loss scale, {scaling[0]:g}"
        name = f"loss is {loss:g}" if not isfinite(loss) else f"gradient is NaN or infinite{at_scale}"
        text = f"iteration {iteration}: the {name}"
        if found := bad_states(self._engine):
            raise NumbersError(
                f"{text}, because of NaN or infinity in {described(found)}: resume from a checkpoint before "
                "it, with a lower --lr, or without the device of that rank"
            )
        if rescaled:
            return
        origin = find_origin(self._engine, batches.last)
        if origin is not None:
            text += f"; the first NaN or infinity was in {origin}"
        elif self._engine.can_replay:
            text += "; computed again it is finite, so check the devices"
        if applied:  # With some settings DeepSpeed computes no norm, and so applies the update.
            raise NumbersError(f"{text}; its update was applied to the weights: resume from a checkpoint before it")
        self._in_a_row += 1
        if self._config.bad_numbers == "stop":
            raise BadIteration(f"{text}; the weights are those before it: lower --lr, or use --bad-numbers skip")
        if self._in_a_row > self._config.max_bad_numbers_in_a_row:
            raise BadIteration(
                f"{text}; it is number {self._in_a_row} in a row: lower --lr, or raise --max-bad-numbers-in-a-row "
                f"{self._config.max_bad_numbers_in_a_row}"
            )
        self._note(f" skipped {text}")

    def _loss_scaling(self) -> tuple[float, int] | None:
        """Loss scale of fp16, and the overflows until it is lowered; None if it is fixed."""
        scaler = self._scaler
        if scaler is None or not scaler.dynamic:
            return None
        return scaler.cur_scale, scaler.cur_hysteresis


def check_evaluation(config: NumbersConfig, engine: TokenSlicePipelineEngine, name: str, loss: float) -> str | None:
    """Return a line for the log if the loss of an evaluation is not finite, else None; a collective operation."""
    if isfinite(loss) or config.bad_numbers == "ignore":
        return None
    found = bad_states(engine)
    cause = f"because of NaN or infinity in {described(found)}" if found else "and all weights are finite"
    text = f"{name}: the loss is {loss:g}, {cause}"
    if found or config.bad_numbers == "stop":
        raise NumbersError(f"{text}: check the samples, or resume from a checkpoint before it")
    return f" {text}"


WINDOW = 100

LEAST_VALUES = 20

SPREADS = 7.0
"""Spreads above the median at which a value is a spike. OLMo 2 (arXiv 2501.00656, section 3.1) counts losses that are 7
standard deviations from the mean of the previous ones."""

LEAST_SPIKY_LOSS, LEAST_LARGE_GRADS = 1.07, 3.0
"""Least multiples of the median of a spike. Losses of many iterations are nearly equal; norms vary more."""


class SpikeGuard:
    """Finds losses and gradient norms far above the median of the previous ones."""

    def __init__(self, config: NumbersConfig) -> None:
        self._watched: tuple[tuple[str, deque[float], float, str], ...] = (
            ("the loss", deque(maxlen=WINDOW), LEAST_SPIKY_LOSS, config.spiky_loss),
            ("the gradient norm", deque(maxlen=WINDOW), LEAST_LARGE_GRADS, config.large_grads),
        )
        self._lines: list[str] = []
        self._stops = False

    def check(self, iteration: int, loss: float, grad_norm: float | None) -> tuple[bool, bool]:
        """Return whether the loss and the norm of the gradient of an iteration are spikes; NaN is not.

        Args:
            grad_norm: None if its update was skipped.
        """
        self._lines, self._stops = [], False
        spikes = []
        for (name, before, least_ratio, policy), value in zip(self._watched, (loss, grad_norm), strict=True):
            if policy == "ignore" or value is None or not isfinite(value):
                spikes.append(False)
                continue
            bound = inf if len(before) < LEAST_VALUES else outlier_bound(before, SPREADS, least_ratio)
            before.append(value)
            spikes.append(value > bound)
            if value > bound:
                line = (
                    f"{name} of iteration {iteration} is {value:.4g}, above {bound:.4g}, the bound of the previous ones"
                )
                self._lines.append(line)
                self._stops |= policy == "stop"
        return spikes[0], spikes[1]

    def report(self, note: Callable[[str], None]) -> None:
        """Report the spikes of the last iteration, or end the run."""
        if self._stops:
            raise NumbersError(
                f"{'; '.join(self._lines)}: resume from a checkpoint before it, with a lower --lr or another --seed, "
                "or only note it"
            )
        for line in self._lines:
            note(f" warning: {line}")
