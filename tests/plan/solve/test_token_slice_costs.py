import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.plan.costs import TransferCosts, attention_costs
from deepspeed_ext.plan.ops import PipelineShape, Placement
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.plan.solve.cuts import PolynomialCosts, op_costs


@given(st.integers(1, 3), st.lists(st.integers(1, 50), min_size=1, max_size=5), st.floats(0, 1), st.floats(0, 2))
@settings(deadline=None)
def test_equal_layers_cost_what_attention_costs_says(num_model_chunks, lengths, attention_share, head):
    shape = PipelineShape(2 * num_model_chunks, 1, len(lengths), num_model_chunks, Placement.V)
    layers = [1] * shape.num_stages
    token_slice_costs = PolynomialCosts.of_layers(
        layers, sum(lengths), attention_share, layer_time=1 / num_model_chunks, head_time=head
    )
    costs = op_costs(shape, TokenSlices(tuple(lengths)), token_slice_costs)
    expected = attention_costs(shape, lengths, attention_share, head_share=head)
    for ours, theirs in zip(costs.forward + costs.backward, expected.forward + expected.backward, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-12)
    assert np.allclose(costs.weight_gradient, expected.weight_gradient, rtol=0, atol=1e-12)


def test_an_embedding_costs_the_first_stage_no_input_gradient():
    costs = PolynomialCosts.of_layers([2, 1], 10, 0.0, embedding_time=0.5, fixed=0.25)
    times = costs([0, 1], np.array([0]), np.array([10]))
    assert times[:, :, 0].tolist() == [[2.75, 1.25], [2.25, 1.25], [2.75, 1.25]]


def test_messages_are_as_long_as_their_token_slices():
    shape = PipelineShape(2, 1, 2)
    transfer = TransferCosts((0.1,), (2.0,), (50.0, 50.0))
    costs = op_costs(shape, TokenSlices((30, 10)), PolynomialCosts.of_layers([1, 1], 40, 0.5), transfer)
    assert [costs.sending_time(0, token_slice) for token_slice in (0, 1)] == [37.5, 12.5]
