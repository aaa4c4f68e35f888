"""Batches of Hugging Face's data loaders: labels shifted, padding on the right, the mean over labelled tokens."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.transformers_layers import labelled_tokens, split_batch, summed_loss

CUT = TokenSlices((3, 1, 2))
TOKENS = torch.arange(12).reshape(2, 6)


def batch(**changes: Any) -> dict[str, Any]:
    """Row 1 ends with two tokens of padding."""
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1, 4:] = 0
    return {"input_ids": TOKENS, "labels": TOKENS.masked_fill(mask == 0, -100), "attention_mask": mask} | changes


def test_token_slices_sum_to_the_mean_over_labelled_tokens() -> None:
    labels = batch()["labels"].clone()
    labels[:, :4] = -100  # the first token slice has no label at all
    logits = torch.randn(2, 6, 12, dtype=torch.float64)
    parts = split_batch(batch(labels=labels), CUT)
    assert torch.equal(torch.cat([part.inputs for part in parts], dim=1), TOKENS)
    losses = [
        summed_loss(logits[:, start:end], part.labels) * part.loss_weight
        for part, (start, end) in zip(parts, CUT.bounds(), strict=True)
    ]
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert sum(losses).item() == pytest.approx(expected.item(), rel=1e-14)
    assert losses[0] == 0


def test_a_mask_may_be_left_out_and_entries_may_be_none() -> None:
    plain = split_batch({"input_ids": TOKENS, "labels": TOKENS}, CUT)
    parts = split_batch({"input_ids": TOKENS, "labels": TOKENS, "attention_mask": None, "token_type_ids": None}, CUT)
    assert plain[0].loss_weight == parts[0].loss_weight == 1 / 10
    assert plain[2].labels.tolist() == [[5, -100], [11, -100]]


def test_tokens_that_count_are_counted() -> None:
    assert labelled_tokens(batch()) == 5 + 3


def test_losses_of_half_precision_are_computed_in_fp32() -> None:
    logits = torch.randn(1, 2, 5, dtype=torch.bfloat16)
    assert summed_loss(logits, torch.tensor([[1, -100]])).dtype == torch.float32


LEFT = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]])


@pytest.mark.parametrize(
    ("yielded", "said"),
    [
        ((TOKENS, TOKENS), "the data loader yields tuple"),
        ({"input_ids": TOKENS}, "the data loader yields 'input_ids'"),
        (batch(position_ids=TOKENS), "yields 'position_ids'"),
        (batch(attention_mask=LEFT), "in row 1, and causal attention would see them: pad on the right"),
        (batch(attention_mask=torch.ones(2, 1, 6, 6)), "attention_mask has the shape (2, 1, 6, 6)"),
        (batch(labels=TOKENS), "labels of padding count in the loss: give them the label -100"),
        (batch(labels=torch.full((2, 6), -100)), "has no label but -100"),
        ({"input_ids": TOKENS[:, :5], "labels": TOKENS[:, :5]}, "do not have the 6 tokens"),
    ],
)
def test_others_are_refused_in_one_line(yielded: Any, said: str) -> None:
    with pytest.raises(UserError) as refused:
        split_batch(yielded, CUT)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
