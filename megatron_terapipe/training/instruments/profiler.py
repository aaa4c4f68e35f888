"""Profiles of a few iterations: by torch's profiler, or by Nsight Systems, which listens to CUDA's start and stop."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from deepspeed_ext.runtime.ledger.observers import ProfilerRanges
from megatron_terapipe.config import LoggingConfig


class Recorder(Protocol):
    """Records what the device does between start and stop."""

    def start(self) -> None:
        """Begin to record."""

    def stop(self) -> None:
        """End, and keep what was recorded."""


class Profiler:
    """Records the iterations that the flags name, on the ranks that they name; ops and phases have names there."""

    def __init__(self, logging: LoggingConfig, engine: TokenSlicePipelineEngine, note: Callable[[str], None]) -> None:
        self._engine, self._note = engine, note
        chosen = logging.profile and engine.global_rank in logging.profile_ranks
        self._iterations = logging.profiled_iterations if chosen else range(0)
        self._recorder = recorder(logging, engine.global_rank) if chosen else None
        self._records = False

    @contextmanager
    def around(self, iteration: int) -> Iterator[None]:
        """Record an iteration, if it is one of those.

        Args:
            iteration: its number, from 1.
        """
        if iteration not in self._iterations:
            yield
            return
        assert self._recorder is not None, "there are iterations to record"
        if not self._records:
            self._recorder.start()
            self._records = True
        with self._engine.observers.joined_by(ProfilerRanges()):
            yield
        if iteration == self._iterations[-1]:
            self.close()

    def close(self) -> None:
        """Stop, if it records."""
        if self._records and self._recorder is not None:
            self._recorder.stop()
            self._records = False
            self._note(f" profiled iterations {self._iterations[0]} to {self._iterations[-1]}")


def recorder(logging: LoggingConfig, rank: int) -> Recorder:
    """Return what records a profile.

    Args:
        rank: rank of this process, for the name of its file.
    """
    if not logging.use_pytorch_profiler:
        return torch.cuda.profiler
    assert logging.tensorboard_dir is not None, "checked with the flags"
    handler = torch.profiler.tensorboard_trace_handler(str(Path(logging.tensorboard_dir)), worker_name=f"rank{rank}")
    return torch.profiler.profile(record_shapes=True, with_stack=True, on_trace_ready=handler)
