"""Seconds of the phases of a step, over all ranks."""

import torch
import torch.distributed as dist

from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from deepspeed_ext.runtime.ledger.phase_clock import PhaseClock
from megatron_terapipe.config.files.logging import TimingOption

Timers = dict[str, tuple[float, ...]]
"""By phase, seconds: the most of all ranks; or the least and the most; or of each rank."""


def seconds_over_ranks(clock: PhaseClock, engine: TokenSlicePipelineEngine, option: TimingOption) -> Timers:
    """Return the seconds that ranks spent in each phase since they were last asked; every rank must ask."""
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
