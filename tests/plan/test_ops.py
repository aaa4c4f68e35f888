import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape

index = st.integers(0, 10**6)


def test_text_form():
    assert str(Op(OpKind.FORWARD, stage=2, micro_batch=0, token_slice=3)) == "2F0.3"
    assert Op.parse(" 10B11.12 ") == Op(OpKind.BACKWARD, stage=10, micro_batch=11, token_slice=12)


@given(st.builds(Op, st.sampled_from(OpKind), index, index, index))
def test_the_text_form_parses_back(op):
    assert Op.parse(str(op)) == op


@pytest.mark.parametrize("text", ["", "F0.0", "2F0", "2X0.0", "2f0.0", "2F0.0.0", "-1F0.0", "2F0.0 2F0.1"])
def test_other_text_is_refused(text):
    with pytest.raises(PlanError, match=r"write it as 2F0\.3"):
        Op.parse(text)


@pytest.mark.parametrize("extents", [(0, 1, 1), (1, -1, 1), (1, 1, 0), (1.0, 1, 1), ("1", 1, 1)])
def test_extents_are_positive_whole_numbers(extents):
    with pytest.raises(PlanError, match="is not a positive whole number"):
        PipelineShape(*extents)


def test_last_indices():
    shape = PipelineShape(num_stages=4, num_micro_batches=2, num_token_slices=3)
    assert (shape.last_stage, shape.last_token_slice) == (3, 2)
