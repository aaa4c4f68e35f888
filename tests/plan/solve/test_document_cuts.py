"""Token slices cut by the costs of documents, compared with all possible cuts and with counting."""

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.plan.solve.cuts import DocumentCuts

TOKENS = 48

rows = st.sets(st.integers(1, TOKENS - 1), max_size=12).map(lambda inner: (0, *sorted(inner)))
micro_batches = st.lists(rows, min_size=1, max_size=3)


def cost_of(starts: list[tuple[int, ...]], first: int, end: int, cuts: DocumentCuts) -> float:
    """Cost of the tokens [first, end), counted one by one."""
    cost = 0.0
    for row in starts:
        for token in range(first, end):
            position = token - max(start for start in row if start <= token)
            cost += cuts.linear_cost
            for window, each in cuts.attention_costs.items():
                cost += each * (position + 1 if window is None else min(position + 1, window))
    return cost


def costs_of(starts: list[tuple[int, ...]], cut: TokenSlices, cuts: DocumentCuts) -> list[float]:
    return [cost_of(starts, first, end, cuts) for first, end in cut.bounds()]


@given(
    starts=micro_batches,
    count=st.integers(1, 4),
    linear=st.floats(0.1, 20),
    costs=st.dictionaries(st.sampled_from([None, 3, 10]), st.floats(0, 5), max_size=2),
)
def test_no_other_cut_has_a_cheaper_dearest_token_slice(
    starts: list[tuple[int, ...]], count: int, linear: float, costs: dict[int | None, float]
) -> None:
    cuts = DocumentCuts(
        seq_length=TOKENS, num_token_slices=count, linear_cost=linear, attention_costs=costs, granularity=4, quanta=4
    )
    cut = cuts.cut(starts)
    assert cut.seq_length == TOKENS
    assert set(cut.lengths) <= set(cuts.lengths)
    others = (TokenSlices(each) for each in product(cuts.lengths, repeat=count) if sum(each) == TOKENS)
    found = costs_of(starts, cut, cuts)
    every = [costs_of(starts, each, cuts) for each in others]
    dearest = min(map(max, every))
    assert max(found) == pytest.approx(dearest, rel=1e-9)
    evenest = min(sum(each**2 for each in costs) for costs in every if max(costs) <= dearest * (1 + 1e-12))
    assert sum(each**2 for each in found) == pytest.approx(evenest, rel=1e-9)


@given(
    seq_length=st.integers(1, 5000),
    count=st.integers(1, 20),
    granularity=st.sampled_from([1, 2, 16]),
    quanta=st.integers(1, 9),
    ends=st.sets(st.integers(1, 4999), max_size=20),
)
def test_lengths_are_few_and_legal(seq_length: int, count: int, granularity: int, quanta: int, ends: set[int]) -> None:
    if count > seq_length // granularity:
        with pytest.raises(PlanError, match="token slices of"):
            DocumentCuts(
                seq_length=seq_length,
                num_token_slices=count,
                linear_cost=1,
                attention_costs={},
                granularity=granularity,
            )
        return
    cuts = DocumentCuts(
        seq_length=seq_length,
        num_token_slices=count,
        linear_cost=50,
        attention_costs={None: 1},
        granularity=granularity,
        quanta=quanta,
    )
    assert len(cuts.lengths) <= max(4 * quanta, 4) + 2
    assert not any(length % granularity for length in cuts.lengths)
    cut = cuts.cut([(0, *sorted(each for each in ends if each < seq_length))])
    assert (len(cut), cut.seq_length) == (count, seq_length)
    *first, last = cut.lengths
    beyond = seq_length % cuts.quantum
    assert {*first, last - beyond} <= set(cuts.lengths)


def test_a_long_document_is_cut_finer_than_short_ones() -> None:
    cuts = DocumentCuts(seq_length=4096, num_token_slices=8, linear_cost=100, attention_costs={None: 1})
    short = [(0, *range(2048, 4096, 64))]  # a document of 2048 tokens, then short ones
    cut = cuts.cut(short)
    inside = [end - start for start, end in cut.bounds() if end <= 2048]
    assert len(inside) > 5
    assert max(inside[1:]) < cut.lengths[-1]
    equal = TokenSlices.uniform(4096, 8)
    before = cuts.cost_before(short)
    costs = [
        [before[end // cuts.quantum] - before[first // cuts.quantum] for first, end in pairwise(bounds)]
        for bounds in ([0, *(end for _, end in each.bounds())] for each in (cut, equal))
    ]
    assert max(costs[0]) < 0.72 * max(costs[1])
