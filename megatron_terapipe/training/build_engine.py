"""Build the process group and the engine of a prepared run."""

import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_ext import pointwise
from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.layout import StagePartition
from deepspeed_ext.runtime.channels import MessageSpec, TensorSpec
from deepspeed_ext.runtime.cuda_environment import check_same_environment, compared_variables, visible_devices
from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from deepspeed_ext.runtime.health.rank_watch import RankWatch
from deepspeed_ext.runtime.health.stall_watch import GRACE, StallWatch, end_process, watch_this_rank
from deepspeed_ext.runtime.initialize import init_distributed, initialize
from deepspeed_ext.runtime.module import TokenSlicePipelineModule
from deepspeed_ext.runtime.topology import ExpertParallelRanks, SequenceParallelRanks, own_group
from megatron_terapipe.checkpoint.agreement import agreed
from megatron_terapipe.checkpoint.restore import damage_in_one_line, load_checkpoint, saved_run
from megatron_terapipe.config.layers import LAYERS_BEFORE_BLOCKS
from megatron_terapipe.errors import ConfigError, LayersError, NumbersError
from megatron_terapipe.model.gpt import ModelRanks, Predictions, gpt_loss, pipeline_partition, prediction_losses
from megatron_terapipe.model.logits import Logits
from megatron_terapipe.model.tensor_parallel import TensorParallelRanks
from megatron_terapipe.training.end_of_run import LostRank, keep_traceback, remedy
from megatron_terapipe.training.first_rank import limit_of_meeting, rendezvous_error
from megatron_terapipe.training.micro_batches import (
    documents_reader,
    loss_tokens,
    split_batch,
    split_batch_with_labels,
    split_for_predictions,
)
from megatron_terapipe.training.number_guards import refuse_bad_states
from megatron_terapipe.training.optimizer import build_optimizer
from megatron_terapipe.training.own_layers import (
    CheckedLoss,
    blocks_of,
    check_divided_weights,
    check_layers_of,
    partition_of,
)
from megatron_terapipe.training.run import Run, reading_ranks

LAUNCHER_NOTICES_S = 5
"""Seconds in which a launcher detects that a rank has ended; DeepSpeed's polls every second."""

REASON_KNOWN_S = 7.0
"""Seconds in which the lost rank of a broken connection is known, also on another host."""


@contextmanager
def process_group(run: Run, rank_watch: RankWatch) -> Iterator[StallWatch]:
    """Initialise the process group on this rank's own device or cores, and destroy it at the end.

    Raises:
        LostRank: if another rank or a launcher has died, which has been printed.
    """
    run.launch.export()
    if run.config.training.compile_pointwise != "auto":
        os.environ[pointwise.VARIABLE] = run.config.training.compile_pointwise
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        settle_on_cores(run.launch.local_rank, run.launch.local_size)
    else:
        listed = visible_devices(os.environ) if accelerator.device_name() == "cuda" else None
        index = own_device(run.launch.local_rank, accelerator.device_count(), listed or ())
        accelerator.set_device(index)
        # DeepSpeed uses it as the index of the device of tensors and of the process group.
        os.environ["LOCAL_RANK"] = str(index)
    # DeepSpeed calls collectives by names that torch has renamed, which users cannot change.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    backend = run.config.parallel.distributed_backend or accelerator.communication_backend_name()

    joining = ExitStack()

    def met() -> None:
        rank_watch.meet(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        joining.enter_context(rank_watch.limit(*limit_of_meeting(run.launch, _timeout(run))))

    try:
        with joining:
            init_distributed(met=met, dist_backend=backend, timeout=_timeout(run) + GRACE, verbose=False)
            watch = watch_this_rank(
                _timeout(run),
                _ledgers(run),
                # The store may remain when ranks are started again.
                name=f"run {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
                kill_timer=rank_watch.kill_timer,
                remedy=lambda: remedy(run.config.checkpoint.save),
                end=partial(_end, rank_watch),
                ending=lambda why: rank_watch.ending(why, True),
            )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise rendezvous_error(run.launch, _timeout(run), error) from error
    # Also after an error the threads of the watch end before the process does.
    with watch:
        with _errors_explained(run, rank_watch):
            if accelerator.device_name() == "cuda":
                compare_environments()
            yield watch
        # Not in a `finally`: after an error the other ranks may never arrive here, and the launcher ends them.
        with watch.ledger.phase("leaving the process group"):
            if run.launch.world_size > 1:
                # The rank with the store may leave before the others.
                rank_watch.part()
                dist.barrier()
            dist.destroy_process_group()
            # Before the timeout, when a watch without a store ends its rank.
            if late := rank_watch.late_ranks(0.8 * _timeout(run).total_seconds()):
                first = late.keys() >= {*range(run.launch.local_rank)}
                watch.conclude_silent([*late.values()], prints=first)


@contextmanager
def _errors_explained(run: Run, rank_watch: RankWatch) -> Iterator[None]:
    """Wait after an error, so that the rank or launcher with its cause can print it.

    Raises:
        LostRank: if the cause is a rank that has died, which has been printed.
    """
    try:
        yield
    except NumbersError:
        # Every rank raises it and the first one prints it, before a launcher ends that rank.
        if run.launch.rank:
            time.sleep(LAUNCHER_NOTICES_S)
        raise
    except UserError:
        raise
    except Exception as error:
        # Another rank may have failed first: the launcher needs time to detect it, and to exit with its code.
        until = time.monotonic() + LAUNCHER_NOTICES_S
        loss = rank_watch.reason_of_a_lost_connection(REASON_KNOWN_S)
        time.sleep(max(0.0, until - time.monotonic()))
        # After the death of a rank gloo, NCCL and torch raise RuntimeErrors.
        if loss is None or not isinstance(error, RuntimeError):
            raise
        with suppress(OSError):
            keep_traceback(error, _ledgers(run), run.launch.rank)
        raise LostRank(loss.text) from error


def _end(rank_watch: RankWatch) -> None:
    """End this process because the run has stalled, which has been printed."""
    rank_watch.end_is_explained()
    end_process()


def settle_on_cores(local_rank: int, local_size: int) -> None:
    """Use a share of the cores and as many threads, and flush denormals.

    A message between two ranks takes 20 us when each stays on its core and up to 2 ms when the scheduler moves them;
    threads of several ranks on one core wait for each other; denormals, common in fresh models, cost a factor of ten.
    With more ranks than cores the cores are left to the scheduler. OMP_NUM_THREADS, if set, decides the threads.
    """
    torch.set_flush_denormal(True)
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // local_size
    if share:
        os.sched_setaffinity(0, cores[local_rank * share : (local_rank + 1) * share])
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, share))


def compare_environments() -> None:
    """Compare the CUDA environments of all ranks; a collective operation.

    Raises:
        UserError: on every rank, if two have different numbers of hardware queues.
    """
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, (compared_variables(), socket.gethostname()))
    lines = check_same_environment(*zip(*by_rank, strict=True))
    if lines and dist.get_rank() == 0:
        print(*(f"warning: {line}" for line in lines), sep="\n", flush=True)


def own_device(local_rank: int, num_visible: int, listed: Sequence[str] = ()) -> int:
    """Return the index of a rank's device among the visible ones.

    A launcher makes all devices of the host visible to each process, or only its own, as srun with one GPU for a task.

    Args:
        listed: the devices of CUDA_VISIBLE_DEVICES, of which CUDA shows those before the first that is missing, and one
            MIG instance.
    """
    if num_visible == 1 and local_rank and len(listed) > 1:
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES={','.join(listed)[:80]} lists {len(listed)} devices, of which CUDA shows 1 to local "
            f"rank {local_rank} of host {socket.gethostname()}: list devices that nvidia-smi -L shows, or make one "
            "device visible to each rank"
        )
    if num_visible == 1:
        return 0
    if local_rank >= num_visible:
        raise ConfigError(
            f"local rank {local_rank} of host {socket.gethostname()} has no device, because {num_visible} are visible: "
            f"start {num_visible} ranks on a host, or make one device visible to each rank"
        )
    return local_rank


def build_engine(run: Run, watch: StallWatch | None = None) -> TokenSlicePipelineEngine:
    """Build this rank's stage and its engine, and load the checkpoint of the run, if there is one.

    Args:
        watch: the stall watch of this rank; None = the engine makes its own.
    """
    with nullcontext() if watch is None else watch.ledger.phase("building the engine"):
        saved = (
            None
            if run.checkpoint is None
            else saved_run(*run.checkpoint, weights_only=run.config.checkpoint.weights_only)
        )
        engine = _new_engine(run, watch)
    if run.checkpoint is not None and saved is not None:
        with engine.ledger.phase("loading the checkpoint"), damage_in_one_line(run.checkpoint[0]):
            load_checkpoint(engine, *run.checkpoint, saved, run.config.checkpoint)
            refuse_bad_states(engine, f"checkpoint {run.checkpoint[0]}", "load another with --load-tag")
    return engine


def _new_engine(run: Run, watch: StallWatch | None) -> TokenSlicePipelineEngine:
    config, layout, trained = run.config, run.layout, run.trained
    torch.use_deterministic_algorithms(config.training.deterministic_mode)
    # Products that cuBLAS splits into partial sums add them in fp32; torch lets it round them to bf16 or fp16.
    products = torch.backends.cuda.matmul
    products.allow_bf16_reduced_precision_reduction = products.allow_fp16_reduced_precision_reduction = False
    ranks, expert_ranks = tensor_parallel_ranks(run), ExpertParallelRanks.of(layout, _timeout(run))
    sequence_ranks = SequenceParallelRanks.of(layout, _timeout(run))
    cuts = config.document_cuts()
    device = torch.device(get_accelerator().current_device_name())
    layers_and_stages = partial(_layers_and_stages, run, device, ModelRanks(ranks, expert_ranks, sequence_ranks))
    layers, partition = layers_and_stages() if trained.is_gpt else agreed(layers_and_stages, LayersError)

    def hidden_state(rows: int, length: int, dtype: torch.dtype) -> MessageSpec:
        own = length // ranks.size if ranks.sequence_parallel else length
        return (TensorSpec((rows, own, config.model.hidden_size), dtype, requires_grad=True),)

    # DeepSpeed prints its topology and every layer.
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        with device:
            module = TokenSlicePipelineModule(
                layers,
                layout=layout,
                token_slices=config.token_slices(),
                partition=partition,
                num_model_chunks=config.parallel.pipeline().num_model_chunks,
                placement=config.parallel.pipeline().placement,
                **_batch_to_loss(run),
                loss_tokens=loss_tokens if config.training.calculate_per_token_loss else None,
                documents=documents_reader(config.data, numbered=config.model.balances_documents),
                cut_by_documents=cuts and (lambda documents: cuts.cut(documents.starts)),
                # Stages of the vocabulary send more than hidden states.
                activation_spec=None if config.parallel.vocabulary_stages or not trained.is_gpt else hidden_state,
                **_recomputation(run, layers),
                # Masks of the GPT's dropout depend on the position (positional_dropout.py): no layer of it draws from a
                # generator.
                preserve_rng_state=not trained.is_gpt,
                base_seed=config.training.seed,
                tensor_parallel_group=ranks.group,
                expert_ranks=expert_ranks,
                sequence_ranks=sequence_ranks,
            )
        if trained.is_gpt:
            assert module.reading_ranks == reading_ranks(config), "data is built on the ranks that read it"
        else:
            agreed(lambda: check_divided_weights(module, ranks), LayersError)
        engine, *_ = initialize(
            module,
            run.deepspeed_settings,
            schedule=run.proven_schedule,
            timeout=_timeout(run),
            ledger_directory=config.logging.ledgers(config.checkpoint.save),
            watch=watch,
            overlap_grad_reduce=not config.parallel.no_overlap_grad_reduce,
            overlap_param_gather=config.parallel.overlap_param_gather,
            # Tested with the GPT's layers. Others cannot be run on a part of the tokens where ranks share them.
            check_token_slices=not trained.is_gpt and not config.parallel.sequence_parallel,
            key_value_gradients=torch.bfloat16 if config.training.key_value_gradients == "bf16" else None,
            optimizer=build_optimizer(config.optimizer, module.named_parameters()),
        )
    return engine


def _layers_and_stages(run: Run, device: torch.device, ranks: ModelRanks) -> tuple[Sequence[Any], StagePartition | str]:
    """Return the layers of the model, first to last, and their stages."""
    torch.manual_seed(run.config.training.seed)  # Modules that are given whole are equal on all ranks.
    with device:  # Weights are drawn on it.
        layers = run.trained.layers(run.config, ranks)
    check_layers_of(layers, run.trained.program)
    return layers, _partition(run, layers)


def _batch_to_loss(run: Run) -> dict[str, Any]:
    """Return the functions of the module that split micro-batches, and that turn its output into losses and logits."""
    model, trained = run.config.model, run.trained
    split: Callable[..., Any] = split_batch
    loss: Callable[..., Any] = gpt_loss
    logits: Callable[[Any], Tensor] | None = Logits.compute if trained.is_gpt else None
    if model.mtp_num_layers:
        split, loss, logits = split_for_predictions(model), prediction_losses, Predictions.compute
    elif run.config.parallel.vocabulary_stages:
        split, logits = split_batch_with_labels, None
    if trained.loss or not trained.is_gpt:
        loss = CheckedLoss(trained.loss or gpt_loss, trained.program)
    num_losses = 1 + model.mtp_num_layers if model.mtp_num_layers else None
    return {"split_batch": split, "loss_fn": loss, "num_losses": num_losses, "output_fn": logits}


def _recomputation(run: Run, layers: Sequence[Any]) -> dict[str, Any]:
    training, model = run.config.training, run.config.model
    if training.recompute_granularity != "full":
        return {"recompute_stages": training.recompute_granularity == "stage"}
    if training.recompute_method == "uniform":
        return {"activation_checkpoint_interval": training.recompute_num_layers}
    blocks = range(LAYERS_BEFORE_BLOCKS, LAYERS_BEFORE_BLOCKS + model.num_layers)
    if not run.trained.is_gpt:
        blocks = blocks_of(layers, model.num_layers)
    return {
        "recomputed_layers": lambda of_stage: [number for number in of_stage if number in blocks][
            : training.recompute_num_layers
        ]
    }


def tensor_parallel_ranks(run: Run) -> TensorParallelRanks:
    """Return the tensor-parallel ranks of this rank's layers; a collective operation of all ranks."""
    layout = run.layout
    if layout.tensor_parallel_size == 1:
        return TensorParallelRanks()
    group = own_group(layout.groups("tensor"), _timeout(run))
    own = layout.coordinate(run.launch.rank).tensor
    return TensorParallelRanks(own, layout.tensor_parallel_size, group, run.config.parallel.sequence_parallel)


def _partition(run: Run, layers: Sequence[Any]) -> StagePartition | str:
    parallel, num_layers = run.config.parallel, run.config.model.num_layers
    if not run.trained.is_gpt:
        return partition_of(layers, parallel, num_layers, run.trained.program)
    if parallel.stage_partition == "parameters":
        return "parameters"
    blocks = parallel.stage_bounds() or parallel.uniform_stages(num_layers)
    return pipeline_partition(blocks, parallel.vocabulary_parts, run.config.model.mtp_num_layers)


def _timeout(run: Run) -> timedelta:
    return timedelta(minutes=run.config.parallel.distributed_timeout_minutes)


def _ledgers(run: Run) -> Path:
    return run.config.logging.ledgers(run.config.checkpoint.save)
