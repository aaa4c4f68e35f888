"""From samples to what the pipeline's ends read."""

import torch

from megatron_terapipe.data.batch import Batch

SAMPLES = torch.tensor([[1, 2, 0, 3], [4, 0, 0, 5]])


def test_labels_are_the_next_tokens_and_all_count() -> None:
    batch = Batch.from_samples(SAMPLES)
    assert batch.tokens.tolist() == [[1, 2, 0], [4, 0, 0]]
    assert batch.labels.tolist() == [[2, 0, 3], [0, 0, 5]]
    assert batch.loss_mask.tolist() == [[1.0] * 3] * 2
    assert batch.tokens.is_contiguous()
    assert batch.labels.is_contiguous()


def test_predictions_after_the_end_of_a_document_can_be_left_out() -> None:
    batch = Batch.from_samples(SAMPLES, masked_eod=0)
    assert batch.loss_mask.tolist() == [[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]


def test_the_pipeline_gets_inputs_first_and_what_the_loss_needs_last() -> None:
    batch = Batch.from_samples(SAMPLES)
    tokens, (labels, loss_mask) = batch.as_pipeline_batch()
    assert tokens is batch.tokens
    assert labels is batch.labels
    assert loss_mask is batch.loss_mask
