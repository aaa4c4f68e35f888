"""Token slices of equal work, by the FLOPs of a model."""

from collections import defaultdict
from collections.abc import Callable
from math import lcm

from deepspeed_ext.plan.slicing import TokenSlices
from megatron_terapipe.config import flops
from megatron_terapipe.config.attended_positions import attended_positions
from megatron_terapipe.config.model import ModelConfig

TILE = 16
"""Tokens that lengths are rounded to: kernels work in tiles, and an odd length costs a whole one."""


def balanced_token_slices(model: ModelConfig, num_token_slices: int, *, granularity: int = 1) -> TokenSlices:
    """Cut a sequence so that forward plus backward of every token slice cost the same.

    Later token slices attend to more, and a flash kernel's backward costs more of its forward than a matrix product's
    does; so the first token slices are longer than a balance of forward FLOPs alone would make them. Once a sliding
    window is full, every token attends to as much, and token slices are equally long.

    Args:
        model: the model section.
        num_token_slices: token slices wanted.
        granularity: every length is a multiple of this, whatever kernels like.

    Raises:
        PlanError: if the sequence has too few tokens for that.
    """
    granularity = granularity_of(model.seq_length, num_token_slices, granularity)
    return TokenSlices.of_equal_cost(model.seq_length, num_token_slices, _cost_of(model), granularity=granularity)


def _cost_of(model: ModelConfig) -> Callable[[float], float]:
    """Work of the first tokens in all layers, forward and backward, given their number: in FLOPs, at any fraction."""
    linear = sum(flops.linear_flops_per_token(model, block) for block in model.blocks)
    linear *= 1 + flops.BACKWARD_PER_FORWARD
    # Layers attend to as many positions as their windows have.
    attention: dict[int | None, float] = defaultdict(float)
    for block in model.blocks:
        per_position = flops.attention_flops_per_position(model, block)
        attention[block.window] += per_position * (1 + flops.FLASH_BACKWARD_PER_FORWARD)

    def cost(tokens: float) -> float:
        attended = sum(each * float(attended_positions(0, tokens, window)) for window, each in attention.items())
        return linear * tokens + attended

    return cost


def granularity_of(seq_length: int, num_token_slices: int, needed: int) -> int:
    """Tokens that token-slice lengths are multiples of: whole tiles, where token slices are long enough for that.

    Args:
        seq_length: tokens of a sequence.
        num_token_slices: token slices of a sequence.
        needed: tokens that every length must be a multiple of.
    """
    whole_tiles = lcm(TILE, needed)
    return whole_tiles if seq_length >= 4 * whole_tiles * num_token_slices else needed
