"""Pipelines to optimise, for hypothesis: every placement, uneven costs, slow links, memory limits."""

from hypothesis import strategies as st

from deepspeed_ext.plan.costs import OpCosts, TransferCosts
from deepspeed_ext.plan.ops import PipelineShape, Placement
from deepspeed_ext.plan.solve.problem import SchedulingProblem
from tests.strategies import shapes

times = st.floats(0.01, 10.0)


def each(count: int):
    """A time for each of so many things."""
    return st.tuples(*[times] * count)


@st.composite
def problems(draw, is_split=None):
    shape: PipelineShape = draw(shapes(4, 4, 4, 3, tuple(Placement)))
    tables = [draw(st.tuples(*[each(shape.num_token_slices)] * shape.num_stages)) for _ in range(3)]
    if is_split is None:
        is_split = draw(st.booleans())
    links = st.builds(TransferCosts, each(shape.last_stage), each(shape.last_stage), each(shape.num_token_slices))
    costs = OpCosts(tables[0], tables[1], tables[2] if is_split else None, draw(st.sampled_from([0.0, 0.3]) | links))
    memory_limit = draw(st.none() | st.floats(1.0, 3.0))
    lengths = draw(st.lists(st.integers(1, 9), min_size=shape.num_token_slices, max_size=shape.num_token_slices))
    return SchedulingProblem.of(shape, costs, memory_limit, lengths)
