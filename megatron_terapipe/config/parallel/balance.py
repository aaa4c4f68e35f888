"""Token slices of equal work, by the FLOPs of a model."""

from collections import defaultdict
from math import lcm
from typing import TYPE_CHECKING

from deepspeed_ext.plan.slicing import TokenSlices
from megatron_terapipe.config.model import flops
from megatron_terapipe.config.model.attended_positions import attended_positions
from megatron_terapipe.config.model.model import ModelConfig

if TYPE_CHECKING:
    from deepspeed_ext.plan.solve.document_cuts import DocumentCuts

TILE = 16
"""Tokens that lengths are rounded to: kernels work in tiles, and an odd length costs a whole one."""


def balanced_token_slices(model: ModelConfig, num_token_slices: int, *, granularity: int = 1) -> TokenSlices:
    """Cut a sequence so that forward plus backward of every token slice cost the same.

    Later token slices attend to more, and a flash kernel's backward costs more of its forward than a matrix product's
    does; so the first token slices are longer than a balance of forward FLOPs alone would make them. Once a sliding
    window is full, every token attends to as much, and token slices are equally long.

    Args:
        granularity: every length is a multiple of this, whatever kernels like.

    Raises:
        PlanError: if the sequence has too few tokens for that.
    """
    granularity = granularity_of(model.seq_length, num_token_slices, granularity)
    linear, attention = _costs(model)

    def cost(tokens: float) -> float:
        attended = sum(each * float(attended_positions(0, tokens, window)) for window, each in attention.items())
        return linear * tokens + attended

    return TokenSlices.of_equal_cost(model.seq_length, num_token_slices, cost, granularity=granularity)


def document_cuts(model: ModelConfig, num_token_slices: int, *, granularity: int = 1) -> "DocumentCuts":
    """Return what cuts each micro-batch so that its token slices cost the same, with the documents that it has.

    Args:
        granularity: every length is a multiple of this, whatever kernels like.

    Raises:
        PlanError: if the sequence has too few tokens for that.
    """
    # Its package has solvers that are compiled, which takes a second to load.
    from deepspeed_ext.plan.solve.document_cuts import DocumentCuts

    linear, attention = _costs(model)
    return DocumentCuts(
        seq_length=model.seq_length,
        num_token_slices=num_token_slices,
        linear_cost=linear,
        attention_costs=attention,
        granularity=granularity_of(model.seq_length, num_token_slices, granularity),
    )


def _costs(model: ModelConfig) -> tuple[float, dict[int | None, float]]:
    """FLOPs of all layers, forward and backward: of a token, and of a token and attended position by window."""
    linear = sum(flops.linear_flops_per_token(model, block) for block in model.blocks)
    linear *= 1 + flops.BACKWARD_PER_FORWARD
    attention: dict[int | None, float] = defaultdict(float)
    for block in model.blocks:
        per_position = flops.attention_flops_per_position(model, block)
        attention[block.window] += per_position * (1 + flops.FLASH_BACKWARD_PER_FORWARD)
    return linear, dict(attention)


def granularity_of(seq_length: int, num_token_slices: int, needed: int) -> int:
    """Tokens that token-slice lengths are multiples of: whole tiles, where token slices are long enough for that.

    Args:
        needed: tokens that every length must be a multiple of.
    """
    whole_tiles = lcm(TILE, needed)
    return whole_tiles if seq_length >= 4 * whole_tiles * num_token_slices else needed
