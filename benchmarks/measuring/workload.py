"""The model and the engines that the benchmarks compare, on CPUs, one thread a rank."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from datetime import timedelta
from typing import Any, TypeVar

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from deepspeed_ext.plan.layout import ParallelLayout, StagePartition
from deepspeed_ext.plan.ops import Placement
from deepspeed_ext.plan.schedules import Schedule
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.attention.documents import Documents
from deepspeed_ext.runtime.channels import TensorSpec
from deepspeed_ext.runtime.initialize import init_distributed, initialize
from deepspeed_ext.runtime.live_batch import CutByDocuments
from deepspeed_ext.runtime.module import TokenSlicePipelineModule
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.data.loader import MicroBatch
from megatron_terapipe.model.gpt import gpt_layers, gpt_loss, pipeline_partition
from megatron_terapipe.training.build_engine import settle_on_cores
from megatron_terapipe.training.micro_batches import split_batch

Name = TypeVar("Name")

SEQ_LENGTH = 2048
"""Tokens of a sequence."""


def benchmark_model(num_layers: int = 8, *, llama: bool = False) -> ModelConfig:
    """The model of the benchmarks: hidden size 512, byte-sized vocabulary, so that the output layer weighs little.

    Args:
        llama: with Llama's parts instead of GPT-2's.
    """
    parts: dict[str, Any] = {}
    if llama:
        parts = {
            "position_embedding_type": "rope",
            "normalization": "rmsnorm",
            "activation": "swiglu",
            "disable_bias_linear": True,
            "untie_embeddings_and_output_weights": True,
            "num_key_value_heads": 4,
        }
    return ModelConfig(
        num_layers=num_layers, hidden_size=512, num_attention_heads=8, seq_length=SEQ_LENGTH, vocab_size=256, **parts
    )


def join(threads: int = 1) -> None:
    """Join the other ranks, each on its own cores."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    settle_on_cores(int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_SIZE", "1")))
    init_distributed(dist_backend="gloo", timeout=timedelta(minutes=5), verbose=False)


def join_alone() -> None:
    """Join as the only rank, with a thread for each core."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29514"}
    os.environ.update(alone, LOCAL_SIZE=str(len(os.sched_getaffinity(0))))
    join()


def seconds_in_turns(steps: Mapping[Name, Callable[[], object]], rounds: int) -> dict[Name, list[float]]:
    """Return the seconds of each step in each round, after a round that warms up; the steps take turns."""
    times: dict[Name, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if turn:
                times[name].append(time.perf_counter() - start)
    return times


def settings(num_micro_batches: int, micro_batch_size: int) -> dict[str, Any]:
    """DeepSpeed's configuration of every engine: fp32, ZeRO 0, no clipping."""
    return {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": num_micro_batches,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,
    }


def our_engine(
    model: ModelConfig,
    token_slices: TokenSlices,
    num_micro_batches: int,
    *,
    num_stages: int,
    micro_batch_size: int = 1,
    recompute: str = "none",
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    clip: float = 0.0,
    bf16: bool = False,
    schedule: str | Schedule = "1f1b",
    num_model_chunks: int = 1,
    placement: Placement = Placement.LOOPED,
    data_parallel_size: int = 1,
    overlap_grad_reduce: bool = True,
    documents: Callable[[Any], Documents] | None = None,
    cut_by_documents: CutByDocuments | None = None,
    latents_kept: bool = False,
    **more: Any,
) -> Any:
    """Return the token-slice engine.

    Args:
        optimizer: makes the optimizer; None for SGD.
        clip: norm that gradients are clipped at; 0 = never.
        documents: reads off a micro-batch where its documents begin; None if it has one in each row.
        cut_by_documents: gives each micro-batch its token slices; None for the same of all.
        latents_kept: whether latents are kept for later token slices, where attention has latents.
    """
    layout = ParallelLayout(
        data_parallel_size=data_parallel_size,
        pipeline_parallel_size=num_stages,
        num_token_slices=len(token_slices),
    )
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        # Weights are drawn on the device, as in the trainer.
        with torch.device(get_accelerator().current_device_name()):
            module = TokenSlicePipelineModule(
                gpt_layers(model, recompute_cheap=recompute == "selective", latents_kept=latents_kept),
                layout=layout,
                token_slices=token_slices,
                loss_fn=gpt_loss,
                partition=pipeline_partition(_uniform(model, num_stages * num_model_chunks)),
                num_model_chunks=num_model_chunks,
                placement=placement,
                split_batch=split_batch,
                activation_spec=lambda rows, length, dtype: (
                    TensorSpec((rows, length, model.hidden_size), dtype, True),
                ),
                activation_checkpoint_interval=1 if recompute == "full" else 0,
                recompute_stages=recompute == "stage",
                preserve_rng_state=False,
                documents=documents,
                cut_by_documents=cut_by_documents,
            )
        chosen = settings(num_micro_batches, micro_batch_size) | {"gradient_clipping": clip}
        if bf16:
            chosen |= {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1, "contiguous_gradients": False}}
            chosen |= {"data_types": {"grad_accum_dtype": "fp32"}, "zero_allow_untested_optimizer": True}
        engine, *_ = initialize(
            module,
            chosen,
            schedule=schedule,
            optimizer=(optimizer or _sgd)(module),
            overlap_grad_reduce=overlap_grad_reduce,
            **more,
        )
    return engine


def _uniform(model: ModelConfig, num_stages: int) -> StagePartition:
    return StagePartition.uniform(model.num_layers, num_stages)


def _sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=1e-3)


def batches(model: ModelConfig, *, for_deepspeed: bool, micro_batch_size: int = 1) -> Iterator[Any]:
    """Yield one micro-batch for ever, in the form that each engine takes.

    Args:
        for_deepspeed: whether DeepSpeed's engine takes it.
    """
    generator = torch.Generator().manual_seed(0)
    samples = torch.randint(0, model.vocab_size, (micro_batch_size, model.seq_length + 1), generator=generator)
    batch = MicroBatch.from_samples(samples)
    while True:
        yield (batch.tokens, (batch.labels, batch.loss_mask)) if for_deepspeed else batch
