"""Hypothesis strategies shared by tests: pipelines, their costs, and cuts into token slices."""

from hypothesis import strategies as st

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.layout import ParallelLayout
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.schedules import SCHEDULES
from deepspeed_ext.plan.slicing import TokenSlices

schedule_names = st.sampled_from(sorted(SCHEDULES))
times = st.just(0.0) | st.floats(min_value=1e-6, max_value=100.0)


def shapes(
    max_stages: int = 6, max_micro_batches: int = 6, max_token_slices: int = 5
) -> st.SearchStrategy[PipelineShape]:
    """Pipelines small enough to simulate by the hundred; fewer micro-batches than stages, and the reverse."""
    return st.builds(
        PipelineShape,
        num_stages=st.integers(1, max_stages),
        num_micro_batches=st.integers(1, max_micro_batches),
        num_token_slices=st.integers(1, max_token_slices),
    )


def layouts(max_size: int = 5) -> st.SearchStrategy[ParallelLayout]:
    """Layouts over a few ranks on each axis."""
    size = st.integers(1, max_size)
    return st.builds(
        ParallelLayout,
        data_parallel_size=size,
        tensor_parallel_size=size,
        pipeline_parallel_size=size,
        num_token_slices=size,
    )


def cuts(max_token_slices: int = 8, max_length: int = 64) -> st.SearchStrategy[TokenSlices]:
    """Any cut of a sequence into token slices."""
    lengths = st.lists(st.integers(1, max_length), min_size=1, max_size=max_token_slices)
    return lengths.map(lambda lengths: TokenSlices(tuple(lengths)))


def tables(shape: PipelineShape) -> st.SearchStrategy[tuple[tuple[float, ...], ...]]:
    """A time per stage and token slice."""
    row = st.tuples(*[times] * shape.num_token_slices)
    return st.tuples(*[row] * shape.num_stages)


def costs_of(shape: PipelineShape) -> st.SearchStrategy[OpCosts]:
    """Uneven costs of a pipeline."""
    return st.builds(OpCosts, forward=tables(shape), backward=tables(shape), transfer=times)
