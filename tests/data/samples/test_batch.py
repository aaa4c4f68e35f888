"""From samples to what the pipeline reads, documents told apart, against Megatron's masks and positions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.runtime.attention.documents import Documents
from megatron_terapipe.data.loader import Batch

SAMPLES = torch.tensor([[1, 2, 0, 3], [4, 0, 0, 5]])


def positions_of(batch: Batch) -> torch.Tensor:
    """Positions as layers get them."""
    return Documents(batch.document_starts).positions(0, batch.tokens.shape[1])


def test_labels_are_the_next_tokens_and_all_count() -> None:
    batch = Batch.from_samples(SAMPLES)
    assert batch.tokens.tolist() == [[1, 2, 0], [4, 0, 0]]
    assert batch.labels.tolist() == [[2, 0, 3], [0, 0, 5]]
    assert batch.loss_mask.tolist() == [[1.0] * 3] * 2
    assert batch.document_starts == ((0,), (0,))
    assert batch.tokens.is_contiguous()
    assert batch.labels.is_contiguous()


def test_predictions_after_the_end_of_a_document_can_be_left_out() -> None:
    batch = Batch.from_samples(SAMPLES, masked_eod=0)
    assert batch.loss_mask.tolist() == [[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
    assert batch.document_starts == ((0,), (0,))


def test_documents_begin_after_the_ends_of_others() -> None:
    samples = torch.tensor([[1, 0, 2, 3, 0, 4], [0, 0, 5, 6, 7, 0], [1, 2, 3, 4, 5, 6]])
    batch = Batch.from_samples(samples, separating_eod=0)
    # The first row's last end is its last input: what begins after it is in the next sample.
    assert batch.document_starts == ((0, 2), (0, 1, 2), (0,))
    assert positions_of(batch).tolist() == [[0, 1, 0, 1, 2], [0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]
    assert batch.loss_mask.all()


def test_a_batch_made_by_hand_has_one_document_per_row() -> None:
    tokens = torch.zeros(3, 4, dtype=torch.int64)
    batch = Batch(tokens=tokens, labels=tokens, loss_mask=torch.ones(3, 4))
    assert batch.document_starts == ((0,), (0,), (0,))
    assert positions_of(batch).tolist() == [[0, 1, 2, 3]] * 3


@given(data=st.data(), rows=st.integers(1, 3), seq=st.integers(1, 24))
@settings(max_examples=60, deadline=None)
def test_documents_are_megatrons(data: st.DataObject, rows: int, seq: int) -> None:
    megatron = pytest.importorskip("megatron.core.datasets.gpt_dataset")
    eod = 2
    token = st.integers(0, 4)
    samples = torch.tensor([data.draw(st.lists(token, min_size=seq + 1, max_size=seq + 1)) for _ in range(rows)])
    batch = Batch.from_samples(samples, separating_eod=eod, masked_eod=eod)
    positions = positions_of(batch)
    for row in range(rows):
        starts = torch.tensor(batch.document_starts[row])
        # The document of each position: how many have begun by then.
        document = (starts[None] <= torch.arange(seq)[:, None]).sum(1)
        attends = (document[:, None] == document[None]) & torch.ones(seq, seq, dtype=torch.bool).tril()
        mask, loss_mask, position_ids = megatron._get_ltor_masks_and_position_ids(
            batch.tokens[row], eod, True, True, True, True
        )
        assert torch.equal(~attends, mask[0])
        assert torch.equal(batch.loss_mask[row], loss_mask)
        assert torch.equal(positions[row], position_ids)
        assert batch.document_starts[row][0] == 0
        assert list(batch.document_starts[row]) == sorted(set(batch.document_starts[row]))


def test_the_pipeline_gets_inputs_first_and_what_the_loss_needs_last() -> None:
    batch = Batch.from_samples(SAMPLES)
    tokens, (labels, loss_mask) = batch.as_pipeline_batch()
    assert tokens is batch.tokens
    assert labels is batch.labels
    assert loss_mask is batch.loss_mask


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_pinned_batch_is_the_same_in_other_memory() -> None:
    batch = Batch.from_samples(SAMPLES, separating_eod=0, masked_eod=0)
    pinned = batch.pin_memory()
    for ours, theirs in ((pinned.tokens, batch.tokens), (pinned.labels, batch.labels)):
        assert ours.is_pinned()
        assert torch.equal(ours, theirs)
    assert pinned.loss_mask.is_pinned()
    assert torch.equal(pinned.loss_mask, batch.loss_mask)
    assert pinned.document_starts == batch.document_starts
