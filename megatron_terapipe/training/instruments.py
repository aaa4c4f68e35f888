"""Measurements of an iteration: throughput, timers of its phases, and a profiler."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import cuda

from deepspeed_ext.runtime.clocks import PhaseClock, ProfilerRanges
from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from deepspeed_ext.runtime.gradients.gradient_norm import ZeroGradients
from megatron_terapipe.config import LoggingConfig, ModelConfig
from megatron_terapipe.config.flops import iteration_flops
from megatron_terapipe.config.logging import TimingOption
from megatron_terapipe.devices import device_in


def tflops_per_device(
    model: ModelConfig, num_sequences: int, seconds: float, world_size: int, *, causal: bool = False
) -> float:
    """Return the model TFLOP/s of each device in an iteration, counted as `iteration_flops` counts."""
    return iteration_flops(model, num_sequences, causal=causal) / seconds / world_size / 1e12


def peak_tflops(device_name: str, dtype: str) -> float | None:
    """Dense peak of a device in TFLOP/s, by its data sheet; None if the device is not known.

    Args:
        device_name: name that the driver prints, such as `NVIDIA A100-SXM4-80GB`.
        dtype: `fp32`, `fp16` or `bf16`. In fp32 it depends on how torch multiplies, so it is not known.
    """
    device = device_in(device_name)
    return None if device is None or dtype == "fp32" else device.half_flops / 1e12


def peak_tflops_here(dtype: str) -> float | None:
    """Dense peak of this rank's device in TFLOP/s, None on a CPU."""
    if get_accelerator().device_name() != "cuda":
        return None
    return peak_tflops(cuda.get_device_name(), dtype)


Timers = dict[str, tuple[float, ...]]
"""Seconds by phase: the maximum over ranks, the minimum and the maximum, or one figure for each rank."""


def seconds_over_ranks(clock: PhaseClock, engine: TokenSlicePipelineEngine, option: TimingOption) -> Timers:
    """Return the seconds of ranks in each phase since the last call; a collective operation of all ranks."""
    own = torch.tensor(list(clock.take().values()), dtype=torch.float64, device=engine.device)
    if option == "all":
        each = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(each, own)
        rows = each
    else:
        extremes = torch.stack((-own, own))
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        rows = [extremes[1]] if option == "max" else [-extremes[0], extremes[1]]
    return dict(zip(clock.names, zip(*(row.tolist() for row in rows), strict=True), strict=True))


class Profiler:
    """Records the iterations and the ranks of the flags, with names of ops and phases."""

    def __init__(self, logging: LoggingConfig, engine: TokenSlicePipelineEngine, note: Callable[[str], None]) -> None:
        self._engine, self._note = engine, note
        chosen = logging.profile and engine.global_rank in logging.profile_ranks
        self._iterations = logging.profiled_iterations if chosen else range(0)
        self._recorder: Any = None
        if chosen and logging.use_pytorch_profiler:
            directory, name = str(logging.tensorboard_dir), f"rank{engine.global_rank}"
            handler = torch.profiler.tensorboard_trace_handler(directory, worker_name=name)
            self._recorder = torch.profiler.profile(record_shapes=True, with_stack=True, on_trace_ready=handler)
        elif chosen:
            self._recorder = torch.cuda.profiler
        self._records = False

    @contextmanager
    def around(self, iteration: int) -> Iterator[None]:
        """Record an iteration, counted from 1, if it is one of them."""
        if iteration not in self._iterations:
            yield
            return
        if not self._records:
            self._recorder.start()
            self._records = True
        with self._engine.observers.joined_by(ProfilerRanges()):
            yield
        if iteration == self._iterations[-1]:
            self.close()

    def close(self) -> None:
        """Stop recording."""
        if self._records:
            self._recorder.stop()
            self._records = False
            self._note(f" profiled iterations {self._iterations[0]} to {self._iterations[-1]}")


class Instruments:
    """Instruments of the flags: profiler, timers, and the number of zeros in gradients."""

    def __init__(self, logging: LoggingConfig, engine: TokenSlicePipelineEngine, note: Callable[[str], None]) -> None:
        self._engine, self._option = engine, logging.timing_log_option
        level = logging.timing_log_level
        self._clock = PhaseClock(parts=level > 1) if level else None
        self._zeros = ZeroGradients(engine) if logging.log_num_zeros_in_grad else None
        self._profiler = Profiler(logging, engine, note)

    @contextmanager
    def around(self, iteration: int) -> Iterator[None]:
        """Measure an iteration, counted from 1."""
        with ExitStack() as entered:
            entered.enter_context(self._profiler.around(iteration))
            for observer in (self._clock, self._zeros):
                if observer is not None:
                    entered.enter_context(self._engine.observers.joined_by(observer))
            yield

    def timers(self) -> Timers | None:
        """Return the seconds of each phase of the last iteration, if measured; a collective operation of all ranks."""
        return None if self._clock is None else seconds_over_ranks(self._clock, self._engine, self._option)

    def num_zero_gradients(self) -> int | None:
        """Return the number of zeros in the gradient of the last iteration, if counted."""
        return None if self._zeros is None else self._zeros.number()

    def close(self) -> None:
        """Stop the profiler."""
        self._profiler.close()
