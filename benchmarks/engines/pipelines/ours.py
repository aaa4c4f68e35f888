"""Our engine under each of its schedules, with and without token slices."""

from itertools import cycle
from typing import Any

import torch.distributed as dist

from benchmarks.engines.pipelines.engine import Engine, Job
from benchmarks.measuring.workload import our_engine
from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.measured import measured_costs
from deepspeed_ext.plan.schedules import OPTIMISED
from deepspeed_ext.plan.slicing import TokenSlices
from megatron_terapipe.config.parallel.balance import balanced_token_slices
from megatron_terapipe.data.samples.batch import Batch


def ours(job: Job, *, schedule: str, num_token_slices: int, num_model_chunks: int = 1, uniform: bool = False) -> Engine:
    """Return our engine.

    Args:
        schedule: its name; `optimised` is found for op times that are measured first.
        uniform: cut into equal lengths instead of equal work.
    """
    cut = (
        TokenSlices.uniform(job.model.seq_length, num_token_slices)
        if uniform
        else balanced_token_slices(job.model, num_token_slices)
    )
    more: dict[str, Any] = {}
    if schedule == OPTIMISED:
        costs = _measured(job, cut, num_model_chunks)
        more["costs"] = lambda _: costs
    engine = _engine(job, cut, schedule, num_model_chunks, **more)
    data = cycle(_batches(job))
    weights = dict(engine.module.named_parameters())
    return Engine(weights, engine.optimizer, lambda: engine.train_batch(data).item(), engine)


def _engine(job: Job, cut: TokenSlices, schedule: str, num_model_chunks: int = 1, **more: Any) -> Any:
    return our_engine(
        job.model,
        cut,
        job.num_micro_batches,
        num_stages=dist.get_world_size(),
        micro_batch_size=job.micro_batch_size,
        schedule=schedule,
        num_model_chunks=num_model_chunks,
        **more,
    )


def _measured(job: Job, cut: TokenSlices, num_model_chunks: int) -> OpCosts:
    """Op times of the second of two steps, under the order that is found for even costs; the same on all ranks."""
    engine, data = _engine(job, cut, OPTIMISED, num_model_chunks), cycle(_batches(job))
    engine.train_batch(data)
    with engine.timeline() as timelines:
        engine.train_batch(data)
    return measured_costs(timelines)


def _batches(job: Job) -> list[Batch]:
    return [Batch.from_samples(rows) for rows in job.samples().split(job.micro_batch_size)]
