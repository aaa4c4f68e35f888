"""The schedules of torch.distributed.pipelining, on layers in plain torch, as its documentation has them."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from benchmarks.engines.pipelines.engine import Engine, Job, sgd
from benchmarks.engines.pipelines.plain_gpt import Stage, mean_loss, plain_layers, stage_bounds


def torch_pipeline(job: Job, *, schedule_class: type[Any], v_shaped: bool = False) -> Engine:
    """Return a schedule of torch with its stages: one on each rank, or two where the schedule has several.

    Args:
        v_shaped: stages go there and back, so that the first rank has the first and the last one.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    is_single = issubclass(schedule_class, PipelineScheduleSingle)
    num_stages = size if is_single else 2 * size
    second = 2 * size - 1 - rank if v_shaped else rank + size
    numbers = [rank] if is_single else [rank, second]
    layers, bounds = plain_layers(job.model), stage_bounds(job.model.num_layers, num_stages)
    parts = [Stage(layers, bounds[number], bounds[number + 1]) for number in numbers]
    stages = [
        PipelineStage(part, number, num_stages, torch.device("cpu"))
        for part, number in zip(parts, numbers, strict=True)
    ]
    schedule = schedule_class(
        stages[0] if is_single else stages, n_microbatches=job.num_micro_batches, loss_fn=mean_loss
    )
    weights = {name: weight for part in parts for name, weight in part.named_weights().items()}
    optimizer = sgd(weights)
    inputs, labels = job.inputs_and_labels()
    has_last = numbers[-1] == num_stages - 1

    def step() -> float | None:
        losses: list[torch.Tensor] = []
        given = (inputs,) if rank == 0 else ()
        wanted = {"target": labels, "losses": losses} if has_last else {}
        schedule.step(*given, return_outputs=False, **wanted)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().item() if has_last else None

    return Engine(weights, optimizer, step, schedule)
