"""DeepSpeed's own pipeline engines, on layers in plain torch, as its tutorial has them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from itertools import cycle

import deepspeed
import torch.distributed as dist
from deepspeed.pipe import PipelineModule

from benchmarks.engines.pipelines.engine import Engine, Job, sgd
from benchmarks.engines.pipelines.plain_gpt import Block, mean_loss, plain_layers
from benchmarks.measuring.workload import settings

SAME_BLOCKS = f"type:{Block.__name__}"
"""DeepSpeed's partition into stages with as many transformer layers each."""


def deepspeed_pipeline(job: Job, *, module_class: type[PipelineModule]) -> Engine:
    """Return DeepSpeed's engine for a class of modules: `PipelineEngine`, or `DualPipeVEngine`."""
    with _quiet():
        module = module_class(
            plain_layers(job.model),
            num_stages=dist.get_world_size(),
            loss_fn=mean_loss,
            partition_method=SAME_BLOCKS,
        )
        weights = dict(module.named_parameters())
        engine, *_ = deepspeed.initialize(
            model=module, config=settings(job.num_micro_batches, job.micro_batch_size), optimizer=sgd(weights)
        )
    data = cycle(job.micro_batches())
    return Engine(weights, engine.optimizer, lambda: engine.train_batch(data).item(), engine)


@contextmanager
def _quiet() -> Iterator[None]:
    """DeepSpeed prints the layers of each stage."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield
