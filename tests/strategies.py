"""Hypothesis strategies shared by tests: pipelines, their orders and costs, and cuts into token slices."""

from dataclasses import replace
from random import Random

from hypothesis import strategies as st

from deepspeed_ext.plan.costs import OpCosts, TransferCosts
from deepspeed_ext.plan.layout import ParallelLayout
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape, Placement, prerequisites, result
from deepspeed_ext.plan.programs.host_copies import HostCopySettings
from deepspeed_ext.plan.schedules import SCHEDULES, rank_orders, schedule_named
from deepspeed_ext.plan.slicing import TokenSlices

WITH_MODEL_CHUNKS = ("breadth-first", "gpipe", "interleaved")
"""Schedules that run several stages on a rank."""

Orders = list[list[Op]]

schedule_names = st.sampled_from(sorted(SCHEDULES))
times = st.just(0.0) | st.floats(min_value=1e-6, max_value=100.0)


def shapes(
    max_stages: int = 6,
    max_micro_batches: int = 6,
    max_token_slices: int = 5,
    max_model_chunks: int = 1,
    placements: tuple[Placement, ...] = (Placement.LOOPED,),
) -> st.SearchStrategy[PipelineShape]:
    """Pipelines small enough to simulate by the hundred; fewer micro-batches than ranks, and the reverse.

    `max_stages` are those of one model chunk, which are as many as ranks.
    """
    return st.builds(
        lambda num_ranks, num_micro_batches, num_token_slices, num_model_chunks, placement: PipelineShape(
            num_ranks * num_model_chunks, num_micro_batches, num_token_slices, num_model_chunks, placement
        ),
        st.integers(1, max_stages),
        st.integers(1, max_micro_batches),
        st.integers(1, max_token_slices),
        st.integers(1, max_model_chunks),
        st.sampled_from(placements),
    )


def pipelines(
    max_stages: int = 6, max_micro_batches: int = 6, max_token_slices: int = 5, max_model_chunks: int = 4
) -> st.SearchStrategy[tuple[str, PipelineShape]]:
    """A schedule by its name, and a pipeline it can run; with model chunks if it can."""

    def with_shape(name: str) -> st.SearchStrategy[tuple[str, PipelineShape]]:
        most = max_model_chunks if name in WITH_MODEL_CHUNKS else 1
        return st.tuples(st.just(name), shapes(max_stages, max_micro_batches, max_token_slices, most))

    return schedule_names.flatmap(with_shape)


def random_orders(shape: PipelineShape, random: Random) -> Orders:
    """Any orders that can be run, with whole backwards and those in two parts, on any placement.

    Built as one global order in which every op comes after its prerequisites: it cannot deadlock.
    """
    units = [
        (stage, micro_batch, token_slice)
        for stage in range(shape.num_stages)
        for micro_batch in range(shape.num_micro_batches)
        for token_slice in range(shape.num_token_slices)
    ]
    left = [Op(OpKind.FORWARD, *unit) for unit in units]
    for unit in units:
        halves = (OpKind.INPUT_GRADIENT, OpKind.WEIGHT_GRADIENT)
        left += [Op(kind, *unit) for kind in random.choice(((OpKind.BACKWARD,), halves))]
    orders: Orders = [[] for _ in range(shape.num_ranks)]
    done: set[Op] = set()
    while left:
        random.shuffle(left)
        waiting = []
        for op in left:
            if all(needed in done for needed in prerequisites(op, shape)):
                orders[shape.rank_of(op.stage)].append(op)
                done.add(result(op))
            else:
                waiting.append(op)
        left = waiting
    return orders


def orders_of_pipelines(
    max_stages: int = 4, max_micro_batches: int = 4, max_token_slices: int = 4, max_model_chunks: int = 3
) -> st.SearchStrategy[tuple[Orders, PipelineShape]]:
    """Orders of the schedules we ship, and random ones; with the pipeline they are for."""
    extents = (max_stages, max_micro_batches, max_token_slices, max_model_chunks)
    shipped = pipelines(*extents).map(lambda each: (rank_orders(schedule_named(each[0]), each[1]), each[1]))
    drawn = st.tuples(shapes(*extents, tuple(Placement)), st.integers(0, 2**32)).map(
        lambda each: (random_orders(each[0], Random(each[1])), each[0])
    )
    return shipped | drawn


def layouts(max_size: int = 5) -> st.SearchStrategy[ParallelLayout]:
    """Layouts over a few ranks on each axis."""
    size = st.integers(1, max_size)
    dense = st.builds(
        ParallelLayout,
        data_parallel_size=size,
        sequence_parallel_size=size,
        tensor_parallel_size=size,
        pipeline_parallel_size=size,
        num_token_slices=size,
    )
    return dense.flatmap(
        lambda layout: st.sampled_from([n for n in (1, 2, 3, 4, 6, 8) if layout.ranks_of_a_stage % n == 0]).map(
            lambda size: replace(layout, expert_parallel_size=size)
        )
    )


def cuts(max_token_slices: int = 8, max_length: int = 64) -> st.SearchStrategy[TokenSlices]:
    """Any cut of a sequence into token slices."""
    lengths = st.lists(st.integers(1, max_length), min_size=1, max_size=max_token_slices)
    return lengths.map(lambda lengths: TokenSlices(tuple(lengths)))


def tables(shape: PipelineShape) -> st.SearchStrategy[tuple[tuple[float, ...], ...]]:
    """A time per stage and token slice."""
    row = st.tuples(*[times] * shape.num_token_slices)
    return st.tuples(*[row] * shape.num_stages)


def transfers(shape: PipelineShape) -> st.SearchStrategy[float | TransferCosts]:
    """Costs of transfers, as one number or in full."""
    bandwidth = st.floats(min_value=1e-3, max_value=100.0)
    return times | st.builds(
        TransferCosts,
        latency=st.tuples(*[times] * shape.last_stage),
        bandwidth=st.tuples(*[bandwidth] * shape.last_stage),
        message_bytes=st.tuples(*[times] * shape.num_token_slices),
    )


def costs_of(shape: PipelineShape) -> st.SearchStrategy[OpCosts]:
    """Uneven costs of a pipeline, with transfers of one number."""
    table = tables(shape)
    return st.builds(OpCosts, forward=table, backward=table, weight_gradient=table, transfer=times)


def costs_with_links(shape: PipelineShape) -> st.SearchStrategy[OpCosts]:
    """Uneven costs of a pipeline, and uneven links."""
    table = tables(shape)
    return st.builds(OpCosts, forward=table, backward=table, weight_gradient=table, transfer=transfers(shape))


@st.composite
def host_copy_settings(draw: st.DrawFn, shape: PipelineShape) -> HostCopySettings:
    """Sizes, speeds, limits and windows of any kind."""

    def each(entries: st.SearchStrategy) -> st.SearchStrategy:
        return st.tuples(*[entries] * shape.num_stages)

    sizes = each(st.sampled_from([0.0, 1.0, 2.5]))
    speed = st.sampled_from([0.3, 1.0, 10.0, float("inf")])
    return HostCopySettings(
        draw(st.tuples(*[st.integers(1, 9)] * shape.num_token_slices)),
        draw(sizes),
        draw(sizes),
        to_host=draw(speed),
        from_host=draw(speed),
        host_bytes=draw(st.sampled_from([0.0, 10.0, 40.0, float("inf")])),
        windows=draw(st.just(()) | each(st.none() | st.integers(1, 30))),
    )
