"""Attention and positions of documents that share a sequence."""

from collections.abc import Iterator
from itertools import pairwise
from unittest.mock import patch

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.attention.documents import Documents, document_attention
from deepspeed_ext.runtime.attention.flash_kernels import Runs
from deepspeed_ext.runtime.attention.kernels import Attended, PlainAttention
from deepspeed_ext.runtime.state import sequence_state
from deepspeed_ext.runtime.state.sequence_state import SequenceState
from tests.runtime.attention.test_windows import setups, worst_error


class RunsWrittenOut:
    """Computes runs of tokens as flash attention does, from the same arguments."""

    def __init__(self, window: int | None = None) -> None:
        self.plain, self.window = PlainAttention(window=window), window

    def pieces(self, query: torch.Tensor, key: torch.Tensor, runs: Runs) -> Iterator[tuple[slice, slice]]:
        queries, keys = runs.queries.tolist(), runs.keys.tolist()
        assert runs.queries.dtype == runs.keys.dtype == torch.int32
        assert (queries[0], queries[-1], keys[0], keys[-1]) == (0, len(query), 0, len(key))
        lengths = [[end - start for start, end in pairwise(each)] for each in (queries, keys)]
        assert runs.longest_queries == max(lengths[0])
        # In a window a bound is known without a look at the device.
        longest = max(lengths[1])
        assert runs.longest_keys == longest if self.window is None else runs.longest_keys >= longest
        assert min(lengths[0]) > 0
        for here, there in zip(pairwise(queries), pairwise(keys), strict=True):
            yield slice(*here), slice(*there)

    def forward(self, query, key, value, scale: float, runs: Runs):
        parts = [
            self.plain.forward(query[None, here], key[None, there], value[None, there], scale)
            for here, there in self.pieces(query, key, runs)
        ]
        return Attended(
            torch.cat([each.output[0] for each in parts]), torch.cat([each.log_sum_exp[0] for each in parts], dim=1)
        )

    def gradients(self, output_gradient, query, key, value, given: Attended, scale: float, runs: Runs):
        found = []
        for here, there in self.pieces(query, key, runs):
            attended = Attended(given.output[None, here], given.log_sum_exp[None, :, here])
            piece = (output_gradient[None, here], query[None, here], key[None, there], value[None, there], attended)
            gradients = self.plain.backward(*piece, scale)
            keys, values = (torch.cat(both, dim=1)[0] for both in zip(gradients.prefix, gradients.own, strict=True))
            found.append((gradients.query[0], keys, values))
        return tuple(map(torch.cat, zip(*found, strict=True)))


@settings(deadline=None, max_examples=60)
@given(setup=setups(fused=True), seed=st.integers(0, 2**16))
def test_every_document_attends_to_itself_in_one_call(setup, seed: int) -> None:
    torch.manual_seed(seed)
    with patch.object(sequence_state, "kernel_of_runs_for", lambda _, window: RunsWrittenOut(window)):
        assert worst_error(*setup) <= 1e-12


def test_positions_restart_with_each_document() -> None:
    documents = Documents(((0, 3, 4), (0,)))
    state = SequenceState(TokenSlices((5, 3)), documents=documents)
    assert state.past(0, 0).positions(5).tolist() == [[0, 1, 2, 0, 0], [0, 1, 2, 3, 4]]
    assert state.past(0, 1).positions(3).tolist() == [[1, 2, 3], [5, 6, 7]]


def test_a_token_slice_reads_only_its_own_documents() -> None:
    """A sequence of a million tokens may have 100,000 documents, and each layer needs those of each token slice."""
    looked_at: list[int] = []

    class Starts(tuple):
        def __getitem__(self, place):
            found = super().__getitem__(place)
            looked_at.extend(found if isinstance(place, slice) else [found])
            return found

        def __iter__(self):
            raise AssertionError("all documents are gone through")

    documents, cut = Documents((Starts(range(0, 1 << 20, 8)),)), TokenSlices((524_290, 30, 524_256))
    start, end = list(cut.bounds())[1]
    assert documents.positions(start, 30).tolist() == [[2, 3, 4, 5, 6, 7, *list(range(8)) * 3]]
    (seen,) = documents.seen(start, end, torch.device("cpu"))
    assert (seen.first_key, seen.runs.queries.tolist()) == (start - 2, [0, 6, 14, 22, 30])
    attention = document_attention(lambda *piece: piece, documents, end)
    pieces = [piece for piece, *_ in attention._pieces(torch.empty(1, 30), torch.empty(1, end))]
    assert [(first_key, first) for _, first, first_key in pieces] == [
        (start - 2, start),
        *((first, first) for first in range(start + 6, end, 8)),
    ]
    assert len(looked_at) < 150  # binary searches, and the documents themselves


def test_positions_count_on_where_only_attention_is_apart() -> None:
    state = SequenceState(TokenSlices((5, 3)), documents=Documents(((0, 3),), positions_restart=False))
    assert state.past(0, 1).positions(3).tolist() == [[5, 6, 7]]


def test_keys_of_all_token_slices_are_made_at_once() -> None:
    """As for a device; the meta device takes its place."""
    documents = Documents(((0, 3, 4), (0,)))
    meta, host = torch.device("meta"), torch.device("cpu")
    prepared = documents.on(meta, TokenSlices((5, 3)))
    assert documents.on(host, TokenSlices((5, 3))).seen_from == {}
    assert prepared.seen_from.keys() == {0, 5}
    for start, end in ((0, 5), (5, 8)):
        seen = documents.seen(start, end, host)
        assert prepared.seen(start, end, meta) is prepared.seen_from[start]
        for (first_key, runs), row in zip(prepared.seen_from[start], seen, strict=True):
            assert (first_key, *runs[2:]) == (row.first_key, *row.runs[2:])
            assert [each.shape for each in runs[:2]] == [each.shape for each in row.runs[:2]]
    assert [
        (row.first_key, row.runs.queries.tolist(), row.runs.keys.tolist()) for row in documents.seen(2, 6, host)
    ] == [
        (0, [0, 1, 2, 4], [0, 3, 4, 6]),
        (0, [0, 4], [0, 6]),
    ]
