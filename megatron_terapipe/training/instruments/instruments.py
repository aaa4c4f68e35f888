"""The instruments that the flags ask for."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from deepspeed_ext.runtime.gradients.zero_gradients import ZeroGradients
from deepspeed_ext.runtime.ledger.phase_clock import PhaseClock
from megatron_terapipe.config import LoggingConfig
from megatron_terapipe.training.instruments.profiler import Profiler
from megatron_terapipe.training.instruments.timers import Timers, seconds_over_ranks


class Instruments:
    """Instruments that the flags ask for."""

    def __init__(self, logging: LoggingConfig, engine: TokenSlicePipelineEngine, note: Callable[[str], None]) -> None:
        self._engine, self._option = engine, logging.timing_log_option
        level = logging.timing_log_level
        self._clock = PhaseClock(parts=level > 1) if level else None
        self._zeros = ZeroGradients(engine) if logging.log_num_zeros_in_grad else None
        self._profiler = Profiler(logging, engine, note)

    @contextmanager
    def around(self, iteration: int) -> Iterator[None]:
        """Measure an iteration.

        Args:
            iteration: its number, from 1.
        """
        with ExitStack() as entered:
            entered.enter_context(self._profiler.around(iteration))
            for observer in (self._clock, self._zeros):
                if observer is not None:
                    entered.enter_context(self._engine.observers.joined_by(observer))
            yield

    def timers(self) -> Timers | None:
        """Return the seconds of each phase of the last iteration, if asked for; every rank must ask."""
        return None if self._clock is None else seconds_over_ranks(self._clock, self._engine, self._option)

    def num_zero_gradients(self) -> int | None:
        """Return the zeros in the gradient of the last iteration, if asked for."""
        return None if self._zeros is None else self._zeros.number()

    def close(self) -> None:
        """Keep what is recorded."""
        self._profiler.close()
