"""From a prepared run to the process group and the engine."""

import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from deepspeed_ext import pointwise
from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.partition import StagePartition
from deepspeed_ext.runtime.channels import MessageSpec, TensorSpec
from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from deepspeed_ext.runtime.initialize import init_distributed, initialize
from deepspeed_ext.runtime.module import TokenSlicePipelineModule
from deepspeed_ext.runtime.topology import TokenSliceTopology
from megatron_terapipe.checkpoint.load import load_checkpoint
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.model.gpt import gpt_layers, gpt_loss, pipeline_partition
from megatron_terapipe.tensor_parallel.ranks import TensorParallelRanks
from megatron_terapipe.training.cpu_affinity import settle_on_cores
from megatron_terapipe.training.found_plan import check_agreement
from megatron_terapipe.training.optimizer import build_optimizer
from megatron_terapipe.training.run import Run
from megatron_terapipe.training.token_slice_batch import documents_reader, split_batch

LAUNCHER_NOTICES_S = 5
"""Seconds in which a launcher surely sees that a rank has ended; DeepSpeed's looks every second."""


@contextmanager
def process_group(run: Run) -> Iterator[None]:
    """Join the other ranks, each on its own device or cores; leave when done."""
    run.launch.export()
    if run.config.training.compile_pointwise != "auto":
        os.environ[pointwise.VARIABLE] = run.config.training.compile_pointwise
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        settle_on_cores(run.launch.local_rank, run.launch.local_size)
    else:
        accelerator.set_device(run.launch.local_rank)
    # DeepSpeed calls collectives by names that torch has renamed; nobody who trains can do anything about it.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    backend = run.config.parallel.distributed_backend or accelerator.communication_backend_name()
    try:
        init_distributed(dist_backend=backend, timeout=_timeout(run), verbose=False)
    except dist.DistNetworkError as error:
        raise _not_met(run, error) from error
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


def _not_met(run: Run, error: dist.DistNetworkError) -> Exception:
    """Return what to raise where the ranks could not meet: one line if the port is taken, as by a second run."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if run.launch.rank == 0 and "EADDRINUSE" in str(error):
        return ConfigError(
            f"port {port} of {host}, where the ranks meet, is in use, perhaps by another run: give the launcher "
            "another with --master_port"
        )
    return error


def build_engine(run: Run) -> TokenSlicePipelineEngine:
    """Build this rank's stage and its engine, and load the checkpoint if the run goes on from one."""
    config, layout = run.config, run.layout
    check_agreement(run)
    ranks = tensor_parallel_ranks(run)
    recompute = config.training.recompute_granularity

    def hidden_state(rows: int, length: int, dtype: torch.dtype) -> MessageSpec:
        own = length // ranks.size if ranks.sequence_parallel else length
        return (TensorSpec((rows, own, config.model.hidden_size), dtype, requires_grad=True),)

    # DeepSpeed prints its topology and every layer.
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        module = TokenSlicePipelineModule(
            gpt_layers(config.model, ranks, recompute_cheap=recompute == "selective"),
            layout=layout,
            token_slices=config.token_slices(),
            loss_fn=partial(gpt_loss, ranks=ranks),
            partition=_partition(run),
            num_model_chunks=config.parallel.num_model_chunks,
            placement=config.parallel.pipeline().placement,
            split_batch=split_batch,
            documents=documents_reader(config.data),
            activation_spec=hidden_state,
            activation_checkpoint_interval=config.training.recompute_num_layers if recompute == "full" else 0,
            preserve_rng_state=False,  # Masks of dropout go by the place of an element.
            base_seed=config.training.seed,
        )
        engine, *_ = initialize(
            module,
            run.deepspeed_settings,
            schedule=run.schedule,
            timeout=_timeout(run),
            ledger_directory=config.logging.ledgers(config.checkpoint.save),
            optimizer=build_optimizer(config.optimizer, module.named_parameters()),
        )
    if run.checkpoint is not None:
        load_checkpoint(engine, *run.checkpoint, config.checkpoint)
    return engine


def tensor_parallel_ranks(run: Run) -> TensorParallelRanks:
    """This rank among those that share its layers' matrices; every rank must call it at the same time."""
    layout, mine = run.layout, TensorParallelRanks()
    if layout.tensor_parallel_size == 1:
        return mine
    for ranks in TokenSliceTopology(layout).get_axis_comm_lists("model"):
        group = dist.new_group(ranks, timeout=_timeout(run))
        if run.launch.rank in ranks:
            mine = TensorParallelRanks(
                ranks.index(run.launch.rank), len(ranks), group, run.config.parallel.sequence_parallel
            )
    return mine


def _partition(run: Run) -> StagePartition | str:
    parallel, num_layers = run.config.parallel, run.config.model.num_layers
    if parallel.stage_partition == "parameters":
        return "parameters"
    blocks = parallel.stage_bounds() or parallel.uniform_stages(num_layers)
    return pipeline_partition(blocks)


def _timeout(run: Run) -> timedelta:
    return timedelta(minutes=run.config.parallel.distributed_timeout_minutes)
