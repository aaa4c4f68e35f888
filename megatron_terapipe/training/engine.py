"""From a prepared run to the process group and the engine."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from datetime import timedelta

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.partition import StagePartition
from deepspeed_ext.runtime.channels import MessageSpec, TensorSpec
from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from deepspeed_ext.runtime.initialize import init_distributed, initialize
from deepspeed_ext.runtime.module import TokenSlicePipelineModule
from megatron_terapipe.model.gpt import gpt_layers, gpt_loss, pipeline_partition
from megatron_terapipe.training.checkpoint import load_checkpoint
from megatron_terapipe.training.cpu_affinity import settle_on_cores
from megatron_terapipe.training.optimizer import build_optimizer
from megatron_terapipe.training.run import Run
from megatron_terapipe.training.token_slice_batch import split_batch

LAUNCHER_NOTICES_S = 5
"""Seconds in which a launcher surely sees that a rank has ended; DeepSpeed's looks every second."""


@contextmanager
def process_group(run: Run) -> Iterator[None]:
    """Join the other ranks, each on its own device or cores; leave when done."""
    run.launch.export()
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        settle_on_cores(run.launch.local_rank, run.launch.local_size)
    else:
        accelerator.set_device(run.launch.local_rank)
    init_distributed(
        dist_backend=run.config.parallel.distributed_backend or accelerator.communication_backend_name(),
        timeout=_timeout(run),
        verbose=False,
    )
    try:
        yield
    except UserError:
        raise
    except Exception:
        # Perhaps another rank failed first: give the launcher time to see that one, and to exit with its code.
        time.sleep(LAUNCHER_NOTICES_S)
        raise
    # Not in a `finally`: after an error the other ranks may never come, and the launcher ends them.
    dist.destroy_process_group()


def build_engine(run: Run) -> TokenSlicePipelineEngine:
    """Build this rank's stage and its engine, and load the checkpoint if the run goes on from one."""
    config, layout = run.config, run.layout
    hidden_size = config.model.hidden_size

    def hidden_state(rows: int, length: int, dtype: torch.dtype) -> MessageSpec:
        return (TensorSpec((rows, length, hidden_size), dtype, requires_grad=True),)

    # DeepSpeed prints its topology and every layer.
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        module = TokenSlicePipelineModule(
            gpt_layers(config.model),
            layout=layout,
            token_slices=config.token_slices(),
            loss_fn=gpt_loss,
            partition=_partition(run),
            split_batch=split_batch,
            activation_spec=hidden_state,
            activation_checkpoint_interval=1 if config.training.recompute_granularity == "full" else 0,
            base_seed=config.training.seed,
        )
        engine, *_ = initialize(
            module,
            run.deepspeed_settings,
            schedule=config.parallel.pipeline_schedule,
            timeout=_timeout(run),
            optimizer=build_optimizer(config.optimizer, module.parameters()),
        )
    if run.checkpoint is not None:
        load_checkpoint(engine, run.checkpoint[0], config.checkpoint)
    return engine


def _partition(run: Run) -> StagePartition | str:
    parallel, num_layers = run.config.parallel, run.config.model.num_layers
    if parallel.stage_partition == "parameters":
        return "parameters"
    blocks = parallel.stage_bounds() or StagePartition.uniform(num_layers, parallel.pipeline_model_parallel_size)
    return pipeline_partition(blocks)


def _timeout(run: Run) -> timedelta:
    return timedelta(minutes=run.config.parallel.distributed_timeout_minutes)
