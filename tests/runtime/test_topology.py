"""The topology has a token axis that costs no rank, and agrees with the layout and with DeepSpeed's grid."""

import pytest
import torch.distributed as dist
from hypothesis import given

from deepspeed_ext.plan.layout import Coordinate, ParallelLayout
from deepspeed_ext.runtime.topology import SequenceParallelRanks, TokenSliceTopology
from tests.distributed import run_distributed
from tests.runtime.training import Setup, build
from tests.strategies import layouts

LAYOUT = ParallelLayout(pipeline_parallel_size=2, data_parallel_size=2, tensor_parallel_size=3, num_token_slices=8)
SHARING = ParallelLayout(data_parallel_size=2, sequence_parallel_size=2)


def test_token_axis_has_one_rank_and_all_its_steps() -> None:
    topology = TokenSliceTopology(LAYOUT)
    assert topology.get_axis_names() == ["pipe", "token", "data", "model"]
    assert topology.get_dim("token") == 1
    assert topology.world_size() == LAYOUT.world_size == 12


@given(layout=layouts())
def test_ranks_lie_as_in_the_layout(layout: ParallelLayout) -> None:
    topology = TokenSliceTopology(layout)
    assert topology.world_size() == layout.world_size
    for rank in range(layout.world_size):
        place = topology.get_coord(rank)
        data, sequence = divmod(place.data, layout.sequence_parallel_size)
        assert Coordinate(place.pipe, data, sequence, place.model) == layout.coordinate(rank)
        assert place.token == 0
    for axis, name in (("pipe", "pipe"), ("model", "tensor")):
        found = sorted(map(tuple, topology.get_axis_comm_lists(axis)))
        assert found == sorted(tuple(group) for group in layout.groups(name))


@given(layout=layouts())
def test_ranks_with_the_same_weights_are_the_replicas_of_deepspeed(layout: ParallelLayout) -> None:
    replicas = TokenSliceTopology(layout).get_axis_comm_lists("data")
    assert all(len(ranks) == layout.num_weight_copies for ranks in replicas)
    for ranks in replicas:
        places = {layout.coordinate(rank)[::3] for rank in ranks}
        assert len(places) == 1, "of one stage and tensor-parallel rank"


@pytest.mark.parametrize(("rank", "name"), [(0, "model_00"), (1, "model_01"), (11, "model_02")])
def test_names_of_layer_files_have_no_token_part(rank: int, name: str) -> None:
    # DeepSpeed finds layer files by this pattern; `layer_00-token_00-model_00` would hide them.
    assert TokenSliceTopology(LAYOUT).get_rank_repr(rank) == name


def test_other_axes_can_still_be_named() -> None:
    assert TokenSliceTopology(LAYOUT).get_rank_repr(11, omit_axes=["data"]) == "pipe_01-token_00-model_02"


def _grid() -> dict[str, object]:
    engine = build(Setup(pp=2, dp=2, cut=(9, 1, 8, 6)))
    grid, ranks = engine.grid, SequenceParallelRanks.of(SHARING)
    return {
        "sizes": (grid.get_pipe_parallel_world_size(), grid.get_data_parallel_world_size()),
        "place": Coordinate(grid.get_pipe_parallel_rank(), grid.get_data_parallel_rank(), 0, 0),
        "world": engine.dp_world_size,
        "slices": engine.grid._topo.layout.num_token_slices,
        "sequence": (ranks.rank, ranks.size, dist.get_process_group_ranks(ranks.group)),
    }


def test_grid_of_an_engine_and_sequence_parallel_ranks_agree_with_the_layout() -> None:
    layout = ParallelLayout(pipeline_parallel_size=2, data_parallel_size=2)
    for rank, found in enumerate(run_distributed(_grid, 4)):
        assert found.pop("sequence") == (rank % 2, 2, [rank - rank % 2, rank - rank % 2 + 1])
        assert found == {"sizes": (2, 2), "place": layout.coordinate(rank), "world": 2, "slices": 4}
