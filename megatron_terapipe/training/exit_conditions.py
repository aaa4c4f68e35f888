"""Conditions under which a run ends before its last iteration."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from types import FrameType

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from megatron_terapipe.config.training.training import TrainingConfig

NEVER: Callable[[], bool] = lambda: False  # noqa: E731
"""A signal that never comes."""


class ExitReason(Enum):
    """Reason for the end of a run, in the words of the log."""

    SIGNAL = "a SIGTERM came"
    DURATION = "--exit-duration-in-mins have passed"
    INTERVAL = "--exit-interval is reached"


class ExitConditions:
    """Asks after every iteration whether the run ends with it, and gives every rank the same answer.

    Args:
        training: the section that sets the conditions.
        signalled: whether this rank was told to end.
        clock: seconds from some moment on; the run begins now.
        agree: takes whether this rank would end and returns whether any would; every rank calls it at the same time.
    """

    def __init__(
        self,
        training: TrainingConfig,
        *,
        signalled: Callable[[], bool] = NEVER,
        clock: Callable[[], float] = time.monotonic,
        agree: Callable[[bool], bool] | None = None,
    ) -> None:
        self._training = training
        self._signalled, self._clock, self._agree = signalled, clock, agree or any_rank
        self._start = clock()

    def reason(self, iteration: int) -> ExitReason | None:
        """Return why the run ends after this iteration, None if it goes on."""
        training = self._training
        # Signals and clocks reach ranks at different times, and a rank that leaves alone leaves the others hanging.
        if training.exit_signal_handler and self._agree(self._signalled()):
            return ExitReason.SIGNAL
        if training.exit_duration_in_mins is not None:
            minutes = (self._clock() - self._start) / 60
            if self._agree(minutes > training.exit_duration_in_mins):
                return ExitReason.DURATION
        if training.exit_interval is not None and iteration % training.exit_interval == 0:
            return ExitReason.INTERVAL
        return None


def any_rank(mine: bool) -> bool:
    """Whether it holds on any rank."""
    flag = torch.tensor(mine, dtype=torch.int32, device=get_accelerator().current_device_name())
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


@contextmanager
def heard_signal(wanted: bool) -> Iterator[Callable[[], bool]]:
    """Take SIGTERM as a request, not as the end; what is yielded tells whether it came.

    Args:
        wanted: whether to; if not, SIGTERM ends the process as ever.
    """
    if not wanted:
        yield NEVER
        return
    heard: list[int] = []

    def hear(number: int, _: FrameType | None) -> None:
        heard.append(number)

    before = signal.signal(signal.SIGTERM, hear)
    try:
        yield lambda: bool(heard)
    finally:
        signal.signal(signal.SIGTERM, before)
