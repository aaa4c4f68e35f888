import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape, Placement
from tests.strategies import shapes

index = st.integers(0, 10**6)


def test_text_form():
    assert str(Op(OpKind.FORWARD, stage=2, micro_batch=0, token_slice=3)) == "2F0.3"
    assert Op.parse(" 10B11.12 ") == Op(OpKind.BACKWARD, stage=10, micro_batch=11, token_slice=12)
    assert str(Op(OpKind.WEIGHT_GRADIENT, stage=2, micro_batch=0, token_slice=3)) == "2BW0.3"


def test_one_token_slice_need_not_be_named():
    assert Op.parse("2F7") == Op(OpKind.FORWARD, stage=2, micro_batch=7, token_slice=0)


def test_letters_of_torch_distributed_pipelining():
    assert Op.parse("2I0") == Op.parse("2BI0.0")
    assert Op.parse("2W0") == Op.parse("2BW0.0")


@given(st.builds(Op, st.sampled_from(OpKind), index, index, index))
def test_the_text_form_parses_back(op):
    assert Op.parse(str(op)) == op


@pytest.mark.parametrize("text", ["", "F0.0", "2F", "2X0.0", "2f0.0", "2F0.0.0", "-1F0.0", "2F0.0 2F0.1", "2BB0.0"])
def test_other_text_is_refused(text):
    with pytest.raises(PlanError, match=r"write it as 2F0\.3"):
        Op.parse(text)


@pytest.mark.parametrize("extents", [(0, 1, 1), (1, -1, 1), (1, 1, 0), (1.0, 1, 1), ("1", 1, 1)])
def test_extents_are_positive_whole_numbers(extents):
    with pytest.raises(PlanError, match="is not a positive whole number"):
        PipelineShape(*extents)


def test_stages_are_dealt_evenly():
    with pytest.raises(PlanError, match="5 stages cannot be dealt as 2 model chunks to each pipeline rank"):
        PipelineShape(5, 1, 1, num_model_chunks=2)


def placed(shape: PipelineShape) -> list[list[int]]:
    return [list(shape.stages_of(rank)) for rank in range(shape.num_ranks)]


def test_placements_by_hand():
    assert placed(PipelineShape(6, 1, 1, 3)) == [[0, 2, 4], [1, 3, 5]]
    assert placed(PipelineShape(6, 1, 1, 3, Placement.V)) == [[0, 3, 4], [1, 2, 5]]
    assert placed(PipelineShape(3, 1)) == [[0], [1], [2]]


@given(shapes(max_model_chunks=4, placements=tuple(Placement)))
def test_every_stage_has_one_rank_and_every_rank_as_many_stages(shape):
    stages = placed(shape)
    assert sorted(stage for each in stages for stage in each) == list(range(shape.num_stages))
    assert {len(each) for each in stages} == {shape.num_model_chunks}
    assert all(shape.rank_of(stage) == rank for rank, each in enumerate(stages) for stage in each)


@given(shapes(max_model_chunks=4, placements=tuple(Placement)))
def test_fields_of_a_shape_read_back(shape):
    fields = shape.to_fields()
    again = PipelineShape.from_fields(fields)
    assert placed(again) == placed(shape)
    assert (again == shape) or shape.num_model_chunks == 1
    assert ("num_model_chunks" in fields) == (shape.num_model_chunks > 1)


def test_last_indices():
    shape = PipelineShape(num_stages=4, num_micro_batches=2, num_token_slices=3)
    assert (shape.last_stage, shape.last_token_slice) == (3, 2)
