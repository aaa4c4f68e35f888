"""The engines that are measured, by name."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from deepspeed.pipe import DualPipeVModule, PipelineModule
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import ScheduleDualPipeV

from benchmarks.engines.names import DEEPSPEED, IN_ONE_THREAD, IN_TWO_THREADS, PIPELINE_ENGINE, TORCH, ours_with
from benchmarks.engines.pipelines.deepspeed_pipelines import deepspeed_pipeline
from benchmarks.engines.pipelines.engine import Engine, Job
from benchmarks.engines.pipelines.ours import ours
from benchmarks.engines.pipelines.plain import plain
from benchmarks.engines.pipelines.torch_pipelines import torch_pipeline
from benchmarks.engines.results import Name
from deepspeed_ext.plan.schedules import OPTIMISED

OUR_SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b"},
    "zero-bubble": {"schedule": "zero-bubble"},
    "interleaved, 2 model chunks": {"schedule": "interleaved", "num_model_chunks": 2},
    "optimised": {"schedule": OPTIMISED},
    "optimised, 2 model chunks": {"schedule": OPTIMISED, "num_model_chunks": 2},
}
TORCH_SCHEDULES: dict[str, dict[str, Any]] = {
    "GPipe": {"schedule_class": ScheduleGPipe},
    "1F1B": {"schedule_class": Schedule1F1B},
    "Interleaved1F1B, 2 stages": {"schedule_class": ScheduleInterleaved1F1B},
    "InterleavedZeroBubble, 2 stages": {"schedule_class": ScheduleInterleavedZeroBubble},
    "ZBVZeroBubble": {"schedule_class": ScheduleZBVZeroBubble, "v_shaped": True},
    "DualPipeV": {"schedule_class": ScheduleDualPipeV, "v_shaped": True},
}


@dataclass(frozen=True)
class Entry:
    """An engine under one schedule."""

    name: Name
    build: Callable[[Job], Engine]
    """Makes it on this rank; raises if it does not take the job."""


def catalogue(num_token_slices: int) -> list[Entry]:
    """Return the engines; the first one is plain torch, which the others are held against.

    Args:
        num_token_slices: token slices of a sequence, where it is cut.
    """
    entries = [
        Entry(IN_ONE_THREAD, partial(plain, threads=1)),
        Entry(IN_TWO_THREADS, partial(plain, threads=2)),
        Entry(PIPELINE_ENGINE, partial(deepspeed_pipeline, module_class=PipelineModule)),
        Entry(Name(DEEPSPEED, "DualPipeV"), partial(deepspeed_pipeline, module_class=DualPipeVModule)),
    ]
    entries += [
        Entry(Name(TORCH, name), partial(torch_pipeline, **arguments)) for name, arguments in TORCH_SCHEDULES.items()
    ]
    entries += [
        Entry(Name(ours_with(count), name), partial(ours, num_token_slices=count, **arguments))
        for count in (1, num_token_slices)
        for name, arguments in OUR_SCHEDULES.items()
    ]
    uniform = partial(ours, schedule="1f1b", num_token_slices=num_token_slices, uniform=True)
    return [*entries, Entry(Name(ours_with(num_token_slices), "1f1b, uniform lengths"), uniform)]
