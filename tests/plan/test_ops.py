"""Ops, shapes, and how many ops can be planned."""

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ext.plan import layout, ops, slicing
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape, Placement, check_num_ops, slow_planning
from deepspeed_ext.plan.solve import cuts
from tests.strategies import shapes

index = st.integers(0, 10**6)


def test_text_form():
    assert str(Op(OpKind.FORWARD, stage=2, micro_batch=0, token_slice=3)) == "2F0.3"
    assert Op.parse(" 10B11.12 ") == Op(OpKind.BACKWARD, stage=10, micro_batch=11, token_slice=12)
    assert str(Op(OpKind.WEIGHT_GRADIENT, stage=2, micro_batch=0, token_slice=3)) == "2BW0.3"
    assert Op.parse("2F7") == Op(OpKind.FORWARD, stage=2, micro_batch=7, token_slice=0)
    # The letters of torch.distributed.pipelining.
    assert Op.parse("2I0") == Op.parse("2BI0.0")
    assert Op.parse("2W0") == Op.parse("2BW0.0")


@given(st.builds(Op, st.sampled_from(OpKind), index, index, index))
def test_the_text_form_parses_back(op):
    assert Op.parse(str(op)) == op


def placed(shape: PipelineShape) -> list[list[int]]:
    return [list(shape.stages_of(rank)) for rank in range(shape.num_ranks)]


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


def test_pipelines_in_use_are_planned_and_the_time_of_large_ones_is_stated() -> None:
    for extents in ((16, 1024, 64), (1, 100_000, 1), (10_000, 1024, 1), (64, 4096, 32), (4, 8, 16_384)):
        check_num_ops(PipelineShape(*extents))
    assert slow_planning(PipelineShape(16, 1024, 64)) is None
    line = "planning a step of 8,388,608 forwards and backwards takes about 17 s"
    assert slow_planning(PipelineShape(64, 1024, 64)) == line


@pytest.mark.parametrize("module", [ops, layout, slicing, cuts])
def test_examples_in_docstrings_are_true(module) -> None:
    assert not doctest.testmod(module).failed
