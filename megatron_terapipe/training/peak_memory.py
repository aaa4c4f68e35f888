"""The most memory that each stage ever held."""

import resource

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine


def peak_memory_bytes() -> int:
    """Most that this rank held: of tensors on its accelerator; on a CPU, of the whole process."""
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        return int(accelerator.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # KiB on Linux


def peak_memory_by_stage(engine: TokenSlicePipelineEngine) -> tuple[int, ...]:
    """Most that any rank of each stage held; every rank must ask."""
    peaks = torch.zeros(engine.num_stages, dtype=torch.int64, device=engine.device)
    peaks[engine.stage_id] = peak_memory_bytes()
    dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
    return tuple(peaks.tolist())


def memory_line(iteration: int, by_stage: tuple[int, ...]) -> str:
    """Return the line of the log with the peak memory of each stage in MiB.

    Args:
        iteration: iterations done.
        by_stage: peak memory of each stage, in bytes.
    """
    stages = " | ".join(f"stage {stage}: {peak / 2**20:.1f}" for stage, peak in enumerate(by_stage))
    return f" peak memory after {iteration} iterations (MiB) | {stages} |"
