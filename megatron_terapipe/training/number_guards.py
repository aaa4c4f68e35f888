"""Guards of the numbers of a run: NaN and infinity in losses, gradients and states, unequal copies, and spikes."""

from collections import deque
from collections.abc import Callable, Iterator
from math import inf, isfinite
from typing import Any

from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from deepspeed_ext.runtime.health.states import bad_states, described, differences
from deepspeed_ext.runtime.origin import find_origin
from megatron_terapipe.config.training import NumbersConfig
from megatron_terapipe.errors import NumbersError
from megatron_terapipe.training.records import outlier_bound


def refuse_bad_states(engine: TokenSlicePipelineEngine, what: str, remedy: str) -> None:
    """See that weights and optimizer states are numbers, on every rank; every rank must ask."""
    if found := bad_states(engine):
        raise NumbersError(f"{what} has NaN or infinity in {described(found)}: {remedy}")


def refuse_different_copies(engine: TokenSlicePipelineEngine, iteration: int, equal_after: int) -> None:
    """See that copies of weights and optimizer states are equal, on every rank; every rank must ask.

    Args:
        equal_after: iterations done when the copies were equal.
    """
    if found := differences(engine):
        raise NumbersError(
            f"after iteration {iteration} copies are not equal: {described(found)}: go on from the "
            f"checkpoint of iteration {equal_after} or before, and look for a defect of those ranks' devices and links"
        )


class BadIteration(NumbersError):
    """An iteration with bad numbers, whose update never reached the weights: they are those of the iteration before."""


class RememberedBatches(Iterator[Any]):
    """Micro-batches of a rank, of which those of the last iteration are kept."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self.last: list[Any] = []

    def begin(self) -> None:
        """Forget those of the iteration before."""
        self.last = []

    def __next__(self) -> Any:
        """The next micro-batch."""
        self.last.append(next(self._batches))
        return self.last[-1]


class BadNumbers:
    """Checks the loss of each iteration and whether it was an update, which are read anyway; more if they are bad."""

    def __init__(self, config: NumbersConfig, engine: TokenSlicePipelineEngine, note: Callable[[str], None]) -> None:
        self._config, self._engine, self._note = config, engine, note
        self._in_a_row = 0
        self._scaler = getattr(engine.optimizer, "loss_scaler", None) if engine.fp16_enabled() else None
        if getattr(self._scaler, "dynamic", False):
            # At the lowest scale DeepSpeed would end with a traceback on every rank.
            self._scaler.raise_error_at_min_scale = False
        self._scaling = self._loss_scaling()

    def check(self, iteration: int, loss: float, batches: RememberedBatches) -> None:
        """Look at an iteration; every rank must, with the same loss.

        Args:
            batches: micro-batches of this rank, those of the iteration among them.

        Raises:
            BadIteration: if its loss or its gradient is no number, and the run is to end.
            NumbersError: if weights or states are none, too.
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
        what = f"loss is {loss:g}" if not isfinite(loss) else f"gradient is NaN or infinite{at_scale}"
        said = f"iteration {iteration}: the {what}"
        if found := bad_states(self._engine):
            raise NumbersError(
                f"{said}, because of NaN or infinity in {described(found)}: go on from a checkpoint before it, "
                "with a lower --lr, or without that rank's device"
            )
        if rescaled:
            return
        origin = find_origin(self._engine, batches.last)
        if origin is not None:
            said += f"; the first NaN or infinity was in {origin}"
        elif self._engine.can_replay:
            said += "; computed again it is a number, so look for a defect of a device"
        if applied:  # Settings of DeepSpeed's can leave out the norm, by which an update is held back.
            raise NumbersError(f"{said}; its update has reached the weights: go on from a checkpoint before it")
        self._in_a_row += 1
        if self._config.bad_numbers == "stop":
            raise BadIteration(f"{said}; the weights are those before it: lower --lr, or give --bad-numbers skip")
        if self._in_a_row > self._config.max_bad_numbers_in_a_row:
            raise BadIteration(
                f"{said}; it is number {self._in_a_row} in a row: lower --lr, or raise --max-bad-numbers-in-a-row "
                f"{self._config.max_bad_numbers_in_a_row}"
            )
        self._note(f" skipped {said}")

    def _loss_scaling(self) -> tuple[float, int] | None:
        """What an overflow lowers in fp16: the scale, and the overflows until the scale falls. None if it is fixed."""
        scaler = self._scaler
        if scaler is None or not scaler.dynamic:
            return None
        return scaler.cur_scale, scaler.cur_hysteresis


def check_evaluation(config: NumbersConfig, engine: TokenSlicePipelineEngine, what: str, loss: float) -> str | None:
    """Return a line for the log if the loss of an evaluation is NaN or infinite, else None; every rank must ask."""
    if isfinite(loss) or config.bad_numbers == "ignore":
        return None
    found = bad_states(engine)
    cause = f"because of NaN or infinity in {described(found)}" if found else "and all weights are numbers"
    said = f"{what}: the loss is {loss:g}, {cause}"
    if found or config.bad_numbers == "stop":
        raise NumbersError(f"{said}: look at the samples, or go on from a checkpoint before it")
    return f" {said}"


WINDOW = 100
"""Values of which the bound is made."""

LEAST_VALUES = 20
"""Values below which there is no bound: the spread of fewer says little."""

SPREADS = 7.0
"""Spreads above the median from which on a value is a spike. OLMo 2 (arXiv 2501.00656, section 3.1) counts losses that
are 7 standard deviations from the mean of those before."""

LEAST_SPIKY_LOSS, LEAST_LARGE_GRADS = 1.07, 3.0
"""Parts of the median that a spike is at least. Losses of many iterations are nearly the same; norms never are."""


class SpikeGuard:
    """Finds losses and gradient norms far above the median of those before."""

    def __init__(self, config: NumbersConfig) -> None:
        self._watched: tuple[tuple[str, deque[float], float, str], ...] = (
            ("the loss", deque(maxlen=WINDOW), LEAST_SPIKY_LOSS, config.spiky_loss),
            ("the gradient norm", deque(maxlen=WINDOW), LEAST_LARGE_GRADS, config.large_grads),
        )
        self._lines: list[str] = []
        self._stops = False

    def look(self, iteration: int, loss: float, grad_norm: float | None) -> tuple[bool, bool]:
        """Return whether the loss and the norm of the gradient of an iteration are spikes; NaN never is.

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
                    f"{name} of iteration {iteration} is {value:.4g}, above {bound:.4g}, the bound by those before it"
                )
                self._lines.append(line)
                self._stops |= policy == "stop"
        return spikes[0], spikes[1]

    def tell(self, note: Callable[[str], None]) -> None:
        """Note the spikes of the last iteration, or end the run."""
        if self._stops:
            raise NumbersError(
                f"{'; '.join(self._lines)}: go on from a checkpoint before it, with a lower --lr or another --seed, or "
                "let it be noted only"
            )
        for line in self._lines:
            note(f" warning: {line}")
