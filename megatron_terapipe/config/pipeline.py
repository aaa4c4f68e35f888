"""Stages, schedule and token slices of the pipeline, as flags name them."""

from collections import defaultdict
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.layout import METHODS, StagePartition
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.schedules import OPTIMISED, SCHEDULES
from deepspeed_ext.plan.slicing import TokenSlices
from megatron_terapipe.config import flops
from megatron_terapipe.config.flops import attended_positions
from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.config.options import one_of
from megatron_terapipe.errors import ConfigError

if TYPE_CHECKING:
    from deepspeed_ext.plan.solve.cuts import DocumentCuts


def listed_stages(stage_partition: str, num_ranks: int, model_chunks: int) -> StagePartition | None:
    """Return the transformer layers of each stage that `--stage-partition` lists; None if it names a rule."""
    if stage_partition in METHODS:
        return None
    if stage_partition.startswith("type:"):
        raise ConfigError(
            f"--stage-partition {stage_partition}: only transformer layers are dealt out, as by "
            "type:transformer: use uniform, and --decoder-first-pipeline-num-layers or "
            "--decoder-last-pipeline-num-layers where embedding and output layer are expensive"
        )
    try:
        bounds = StagePartition.parse(stage_partition)
    except PlanError as error:
        raise ConfigError(f"--stage-partition: {error}") from None
    if bounds.num_stages != num_ranks * model_chunks:
        times = f" x --num-model-chunks {model_chunks}" if model_chunks > 1 else ""
        raise ConfigError(
            f"--stage-partition {bounds} has {bounds.num_stages} stages, but --pipeline-model-parallel-size is "
            f"{num_ranks}{times}: give {num_ranks * model_chunks + 1} bounds, the first layer "
            "of each stage and the end"
        )
    return bounds


def check_schedule(name: str, shape: PipelineShape, memory_limit: float | None) -> None:
    """Check that a name belongs to a schedule or a file, and that the schedule fits the pipeline."""
    if memory_limit is not None and memory_limit < 1:
        raise ConfigError(
            f"--schedule-memory-limit {memory_limit} is less than one micro-batch, which has to go forward before it "
            "can go backward: give 1 or more"
        )
    if memory_limit is not None and name != OPTIMISED:
        raise ConfigError(
            f"--schedule-memory-limit {memory_limit} goes with --pipeline-schedule {OPTIMISED}, not with {name}: "
            "drop it"
        )
    if name in SCHEDULES:
        try:
            # A schedule raises an error for pipelines that it is not for.
            next(SCHEDULES[name](shape, 0), None)
        except PlanError as error:
            raise ConfigError(f"--pipeline-schedule {name}: {error}") from None
    elif name != OPTIMISED and not Path(name).is_file():
        raise ConfigError(
            f"--pipeline-schedule {name} is neither a schedule nor a file of one: choose "
            f"{one_of([*SCHEDULES, OPTIMISED])}, or name a file"
        )


TILE = 16
"""Tokens that lengths are rounded to: kernels work in tiles, and an odd length costs a whole one."""


def balanced_token_slices(model: ModelConfig, num_token_slices: int, *, granularity: int = 1) -> TokenSlices:
    """Cut a sequence so that forward plus backward of every token slice cost the same.

    Later token slices attend to more, and a flash kernel's backward costs more of its forward than a matrix product's
    does; so the first token slices are longer than a balance of only forward FLOPs would make them. Once a sliding
    window is full, every token attends to as much, and token slices are equally long.

    Args:
        granularity: every length is a multiple of this.
    """
    granularity = granularity_of(model.seq_length, num_token_slices, granularity)
    linear, attention = _flops_of_layers(model)

    def cost(tokens: float) -> float:
        attended = sum(each * float(attended_positions(0, tokens, window)) for window, each in attention.items())
        return linear * tokens + attended

    return TokenSlices.of_equal_cost(model.seq_length, num_token_slices, cost, granularity=granularity)


def document_cuts(model: ModelConfig, num_token_slices: int, *, granularity: int = 1) -> "DocumentCuts":
    """Return the cuts of micro-batches with which token slices cost the same, by the documents of each micro-batch.

    Args:
        granularity: every length is a multiple of this.
    """
    # Its package has solvers that are compiled, which takes a second to load.
    from deepspeed_ext.plan.solve.cuts import DocumentCuts

    linear, attention = _flops_of_layers(model)
    return DocumentCuts(
        seq_length=model.seq_length,
        num_token_slices=num_token_slices,
        linear_cost=linear,
        attention_costs=attention,
        granularity=granularity_of(model.seq_length, num_token_slices, granularity),
    )


def _flops_of_layers(model: ModelConfig) -> tuple[float, dict[int | None, float]]:
    """FLOPs of all layers, forward and backward: of a token, and of a token and attended position by window."""
    linear = sum(flops.linear_flops_per_token(model, block) for block in model.blocks)
    linear *= 1 + flops.BACKWARD_PER_FORWARD
    attention: dict[int | None, float] = defaultdict(float)
    for block in model.blocks:
        per_position = flops.attention_flops_per_position(model, block)
        attention[block.window] += per_position * (1 + flops.FLASH_BACKWARD_PER_FORWARD)
    return linear, dict(attention)


def granularity_of(seq_length: int, num_token_slices: int, needed: int) -> int:
    """Tokens that token-slice lengths are multiples of: whole tiles, where token slices are long enough for that."""
    whole_tiles = lcm(TILE, needed)
    return whole_tiles if seq_length >= 4 * whole_tiles * num_token_slices else needed
