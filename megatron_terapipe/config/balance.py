"""Token slices of equal work, by the FLOPs of a model."""

from math import lcm

from deepspeed_ext.plan.slicing import TokenSlices
from megatron_terapipe.config import flops
from megatron_terapipe.config.model import ModelConfig

TILE = 16
"""Tokens that lengths are rounded to: kernels work in tiles, and an odd length costs a whole one."""


def balanced_token_slices(model: ModelConfig, num_token_slices: int, *, granularity: int = 1) -> TokenSlices:
    """Cut a sequence so that forward plus backward of every token slice cost the same.

    Later token slices attend to more, and a flash kernel's backward costs more of its forward than a matrix product's
    does; so the first token slices are longer than a balance of forward FLOPs alone would make them.

    Args:
        model: the model section.
        num_token_slices: token slices wanted.
        granularity: every length is a multiple of this, whatever kernels like.

    Raises:
        PlanError: if the sequence has too few tokens for that.
    """
    # Layers differ at most in heads and widths: weigh their sums.
    attention = flops.model_attention_flops_per_position(model) * (1 + flops.FLASH_BACKWARD_PER_FORWARD)
    # Every token attends to itself as well, whatever its prefix.
    linear = flops.model_linear_flops_per_token(model) * (1 + flops.BACKWARD_PER_FORWARD) + attention
    granularity = granularity_of(model.seq_length, num_token_slices, granularity)
    return TokenSlices.balanced(
        model.seq_length, num_token_slices, linear_cost=linear, attention_cost=attention, granularity=granularity
    )


def granularity_of(seq_length: int, num_token_slices: int, needed: int) -> int:
    """Tokens that token-slice lengths are multiples of: whole tiles, where token slices are long enough for that.

    Args:
        seq_length: tokens of a sequence.
        num_token_slices: token slices of a sequence.
        needed: tokens that every length must be a multiple of.
    """
    whole_tiles = lcm(TILE, needed)
    return whole_tiles if seq_length >= 4 * whole_tiles * num_token_slices else needed
