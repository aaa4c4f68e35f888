"""What follows from an iteration whose loss or gradient is NaN or infinite."""

from collections.abc import Callable, Iterator
from math import isfinite
from typing import Any

from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from deepspeed_ext.runtime.numbers.bad_states import bad_states, described
from deepspeed_ext.runtime.numbers.origin import find_origin
from megatron_terapipe.config.training.numbers import NumbersConfig
from megatron_terapipe.errors import NumbersError


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
    """Looks at what is read of an iteration anyway, its loss and whether it was an update, and at more if that is bad.

    Args:
        config: the section that says what follows.
    """

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
    """Look at the loss of an evaluation; every rank must, with the same loss.

    Args:
        config: the section that says what follows.

    Returns:
        A line for the log if it is no number; None if it is one.

    Raises:
        NumbersError: if it is no number, and the run is to end.
    """
    if isfinite(loss) or config.bad_numbers == "ignore":
        return None
    found = bad_states(engine)
    cause = f"because of NaN or infinity in {described(found)}" if found else "and all weights are numbers"
    said = f"{what}: the loss is {loss:g}, {cause}"
    if found or config.bad_numbers == "stop":
        raise NumbersError(f"{said}: look at the samples, or go on from a checkpoint before it")
    return f" {said}"
