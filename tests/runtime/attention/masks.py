"""Masks of dropout by position, for attention and layers that are written out."""

import torch
from torch import Tensor

from deepspeed_ext.runtime.attention.positional_dropout import DropoutPlace, head_rows, scaled_mask


def keep_mask(rows: Tensor, first_column: int, num_columns: int, probability: float) -> Tensor:
    """Mask of the elements that stay: bool [..., C] from random rows [...]."""
    columns = DropoutPlace(0, (), 0).columns(first_column, num_columns, rows.device)
    return scaled_mask(rows, columns, probability, torch.empty(*rows.shape, num_columns)) != 0


def attention_keep_mask(
    rows: Tensor, first_head: int, num_heads: int, first_key: int, num_keys: int, probability: float
) -> Tensor:
    """Mask of the attention probabilities that stay: bool [B, H, N, E] from random rows [B, N] of the queries."""
    return keep_mask(head_rows(rows, first_head, num_heads), first_key, num_keys, probability)
