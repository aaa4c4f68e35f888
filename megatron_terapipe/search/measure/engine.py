"""Time of the engine outside of layers, from steps of two real engines that differ in their number of layers.

a step = its ops + op_s x their number + optimizer_s_per_parameter x parameters + iteration_s
"""

import os
import time
from contextlib import redirect_stdout
from itertools import cycle, islice, pairwise, repeat
from math import inf
from statistics import median
from typing import NamedTuple

import torch
from deepspeed.accelerator import get_accelerator

from deepspeed_ext.plan.layout import ParallelLayout
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.channels import TensorSpec
from deepspeed_ext.runtime.initialize import initialize
from deepspeed_ext.runtime.module import TokenSlicePipelineModule
from megatron_terapipe.config import ModelConfig, PrecisionConfig
from megatron_terapipe.config.layers import LAYERS_BEFORE_BLOCKS
from megatron_terapipe.config.training import OptimizerConfig
from megatron_terapipe.data.loader import MicroBatch
from megatron_terapipe.model.gpt import gpt_layers, gpt_loss
from megatron_terapipe.search.price.profile import ProfiledEngine
from megatron_terapipe.strategy import Strategy
from megatron_terapipe.training.deepspeed_config import deepspeed_config
from megatron_terapipe.training.micro_batches import split_batch
from megatron_terapipe.training.optimizer import build_optimizer

STEPS = 7
"""Measured steps of each engine, fewer where the time is over."""

LEAST_STEPS = 2

WARM_UP_STEPS = 2

NUM_MICRO_BATCHES = 2


class _Step(NamedTuple):
    """An engine's steps: medians, and the time outside of ops of the one that was disturbed least."""

    parameters: int
    outside_s: float
    least_outside_s: float
    op_s: float


def measure_engine(model: ModelConfig, precision: str, num_token_slices: int, budget_s: float = inf) -> ProfiledEngine:
    """Measure engines with one and with three layers, on one rank; messages between ranks are priced by links."""
    small, large = (_measured_step(model, number, precision, num_token_slices, budget_s / 2) for number in (1, 3))
    # A difference of two medians would be mostly noise.
    each = (large.least_outside_s - small.least_outside_s) / (large.parameters - small.parameters)
    each = max(each, 0.0)
    return ProfiledEngine(
        op_s=median((small.op_s, large.op_s)),
        optimizer_s_per_parameter=each,
        iteration_s=max(min(small.outside_s - each * small.parameters, large.outside_s - each * large.parameters), 0.0),
    )


def _measured_step(
    model: ModelConfig, num_blocks: int, precision: str, num_token_slices: int, budget_s: float
) -> _Step:
    ends = time.perf_counter() + budget_s
    cut = TokenSlices.uniform(model.seq_length, num_token_slices)
    strategy = Strategy(num_token_slices=num_token_slices, global_batch_size=NUM_MICRO_BATCHES)
    flags = PrecisionConfig(bf16=precision == "bf16", fp16=precision == "fp16")
    config = strategy.config(model, precision=flags)
    layout = ParallelLayout(num_token_slices=num_token_slices)
    layers = gpt_layers(model)
    first, end = LAYERS_BEFORE_BLOCKS, LAYERS_BEFORE_BLOCKS + model.num_layers
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        module = TokenSlicePipelineModule(
            [*layers[:first], *islice(cycle(layers[first:end]), num_blocks), *layers[end:]],
            layout=layout,
            token_slices=cut,
            loss_fn=gpt_loss,
            partition="uniform",
            split_batch=split_batch,
            activation_spec=lambda rows, length, dtype: (TensorSpec((rows, length, model.hidden_size), dtype, True),),
        )
        optimizer = build_optimizer(OptimizerConfig(lr=1e-4), module.named_parameters())
        engine, *_ = initialize(module, deepspeed_config(config, layout), optimizer=optimizer)
    outside: list[float] = []
    between: list[float] = []
    batches = map(MicroBatch.from_samples, repeat(torch.randint(model.vocab_size or 2, (1, model.seq_length + 1))))
    for step in range(WARM_UP_STEPS + STEPS):
        if len(outside) >= LEAST_STEPS and time.perf_counter() > ends:
            break
        get_accelerator().synchronize()
        begun = time.perf_counter()
        with engine.timeline() as timelines:
            entered = time.perf_counter() - begun
            engine.train_batch(batches)
            get_accelerator().synchronize()
            seconds = time.perf_counter() - begun - entered
        if step < WARM_UP_STEPS:
            continue
        (spans,) = timelines[0].spans
        busy = sum(span.end - span.start for span in spans)
        gaps = [later.start - earlier.end for earlier, later in pairwise(spans)]
        between.append(median(gaps))
        outside.append(seconds - busy - sum(gaps))
    parameters = sum(weight.numel() for weight in module.parameters())
    return _Step(parameters, median(outside), min(outside), max(median(between), 0.0))
