from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.layout import Coordinate, ParallelLayout
from tests.strategies import layouts


def test_tensor_ranks_are_neighbours_and_pipe_ranks_farthest_apart():
    layout = ParallelLayout(
        data_parallel_size=2, sequence_parallel_size=2, tensor_parallel_size=2, pipeline_parallel_size=2
    )
    assert list(layout.coordinates()) == [Coordinate(*place) for place in product(range(2), repeat=4)]
    assert layout.coordinate(6) == Coordinate(pipe=0, data=1, sequence=1, tensor=0)
    assert layout.groups("tensor")[:3] == [[0, 1], [2, 3], [4, 5]]
    assert layout.groups("sequence")[:3] == [[0, 2], [1, 3], [4, 6]]
    assert layout.groups("data")[:3] == [[0, 4], [1, 5], [2, 6]]
    assert layout.groups("pipe")[:3] == [[0, 8], [1, 9], [2, 10]]


def test_token_slices_need_no_ranks():
    assert ParallelLayout(pipeline_parallel_size=4, num_token_slices=8).world_size == 4


@given(layouts())
def test_ranks_and_coordinates_are_a_bijection(layout):
    coordinates = list(layout.coordinates())
    assert len(set(coordinates)) == layout.world_size
    assert [layout.rank(coordinate) for coordinate in coordinates] == list(range(layout.world_size))


@given(layouts(), st.sampled_from(["pipe", "data", "sequence", "tensor"]))
def test_groups_of_an_axis_cover_every_rank_once_and_differ_in_that_axis_alone(layout, axis):
    groups = layout.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    for group in groups:
        places = [layout.coordinate(rank) for rank in group]
        assert [getattr(place, axis) for place in places] == list(range(len(group)))
        assert len({place._replace(**{axis: 0}) for place in places}) == 1


@given(layouts())
def test_data_parallel_size_is_what_the_other_axes_leave(layout):
    assert layout == ParallelLayout.for_world_size(
        layout.world_size,
        sequence_parallel_size=layout.sequence_parallel_size,
        tensor_parallel_size=layout.tensor_parallel_size,
        pipeline_parallel_size=layout.pipeline_parallel_size,
        num_token_slices=layout.num_token_slices,
    )


@pytest.mark.parametrize("world_size, tensor, pipe", [(6, 2, 2), (0, 1, 1), (4, 0, 1), (4, 8, 1), (-4, 2, 2)])
def test_world_size_must_be_a_multiple(world_size, tensor, pipe):
    with pytest.raises(PlanError, match=f"world size {world_size} is not a multiple"):
        ParallelLayout.for_world_size(world_size, tensor_parallel_size=tensor, pipeline_parallel_size=pipe)


def test_sequence_parallel_size_is_named_where_it_is_not_1():
    with pytest.raises(
        PlanError, match="12 is not a multiple of sequence x tensor x pipeline parallel size 4 x 2 x 1 = 8"
    ):
        ParallelLayout.for_world_size(12, sequence_parallel_size=4, tensor_parallel_size=2)


@pytest.mark.parametrize("size", [0, -1, 1.5, "2"])
def test_sizes_must_be_positive_whole_numbers(size):
    with pytest.raises(PlanError, match=r"tensor_parallel_size=.* is not a positive whole number"):
        ParallelLayout(tensor_parallel_size=size)


@pytest.mark.parametrize("rank", [-1, 4])
def test_ranks_outside_the_world_have_no_coordinate(rank):
    with pytest.raises(PlanError, match=rf"rank {rank} is outside 0\.\.3"):
        ParallelLayout(data_parallel_size=4).coordinate(rank)
