"""Pipelines to optimise, for hypothesis: every placement, uneven costs, slow links, memory limits."""

from hypothesis import strategies as st

from deepspeed_ext.plan.costs import OpCosts, TransferCosts
from deepspeed_ext.plan.ops import PipelineShape, Placement
from deepspeed_ext.plan.solve.problem import SchedulingProblem

times = st.floats(0.01, 10.0)


@st.composite
def shapes(draw, max_ranks=4, max_micro_batches=4, max_token_slices=4):
    num_model_chunks = draw(st.integers(1, 3))
    return PipelineShape(
        draw(st.integers(1, max_ranks)) * num_model_chunks,
        draw(st.integers(1, max_micro_batches)),
        draw(st.integers(1, max_token_slices)),
        num_model_chunks,
        draw(st.sampled_from(Placement)),
    )


@st.composite
def transfers(draw, shape):
    if draw(st.booleans()):
        return draw(st.sampled_from([0.0, 0.3]))
    return TransferCosts(
        tuple(draw(times) for _ in range(shape.last_stage)),
        tuple(draw(times) for _ in range(shape.last_stage)),
        tuple(draw(times) for _ in range(shape.num_token_slices)),
    )


@st.composite
def problems(draw, is_split=None):
    shape = draw(shapes())
    row = st.tuples(*[times] * shape.num_token_slices)
    tables = [draw(st.tuples(*[row] * shape.num_stages)) for _ in range(3)]
    if is_split is None:
        is_split = draw(st.booleans())
    costs = OpCosts(tables[0], tables[1], tables[2] if is_split else None, draw(transfers(shape)))
    memory_limit = draw(st.none() | st.floats(1.0, 3.0))
    lengths = draw(st.lists(st.integers(1, 9), min_size=shape.num_token_slices, max_size=shape.num_token_slices))
    return SchedulingProblem.of(shape, costs, memory_limit, lengths)
