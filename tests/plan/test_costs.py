import json

import pytest

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import Op, PipelineShape

SHAPE = PipelineShape(num_stages=2, num_micro_batches=3, num_token_slices=2)
TABLE = [[1, 2], [3, 4.5]]


def read(**fields) -> OpCosts:
    return OpCosts.from_json(json.dumps({"forward": TABLE, "backward": TABLE, **fields}), SHAPE)


def test_tables_are_per_stage_and_token_slice():
    costs = read(backward=[[10, 20], [30, 40]], transfer=0.25)
    assert costs.duration(Op.parse("1F0.1")) == costs.duration(Op.parse("1F2.1")) == 4.5
    assert costs.duration(Op.parse("0B2.1")) == 20.0
    assert costs.transfer == 0.25


def test_transfers_cost_nothing_unless_said():
    assert read().transfer == 0.0


def test_weight_gradients_are_part_of_the_backward():
    assert read(weight_gradient=[[0.5, 0], [0, 1]]).backward == ((1.5, 2.0), (3.0, 5.5))


def test_uniform():
    costs = OpCosts.uniform(SHAPE, backward=2.0, transfer=0.5)
    assert costs == OpCosts(((1.0, 1.0), (1.0, 1.0)), ((2.0, 2.0), (2.0, 2.0)), 0.5)


@pytest.mark.parametrize("text", ["", "{", "nothing"])
def test_text_that_is_not_json(text):
    with pytest.raises(PlanError, match="costs are not JSON"):
        OpCosts.from_json(text, SHAPE)


def test_json_that_is_no_object():
    with pytest.raises(PlanError, match="costs are not a JSON object"):
        OpCosts.from_json("[]", SHAPE)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"forwards": TABLE}, "unknown field 'forwards'"),
        ({"forward": None}, r"costs\['forward'\] is not a list of lists"),
        ({"forward": [1, 2]}, r"costs\['forward'\] is not a list of lists"),
        ({"backward": [[1, 2]]}, r"costs\['backward'\] has rows of \[2\] times for 2 stages of 2 token slices"),
        ({"backward": [[1, 2], [3]]}, r"rows of \[2, 1\] times"),
        ({"weight_gradient": [[1, 2]]}, r"costs\['weight_gradient'\] has rows"),
        ({"forward": [[1, -2], [3, 4]]}, "entry -2, which is not a time"),
        ({"forward": [[1, True], [3, 4]]}, "entry True, which is not a time"),
        ({"forward": [[1, "2"], [3, 4]]}, "entry '2', which is not a time"),
        ({"forward": [[1, float("nan")], [3, 4]]}, "entry nan, which is not a time"),
        ({"transfer": float("inf")}, r"costs\['transfer'\] has the entry inf"),
        ({"transfer": None}, r"costs\['transfer'\] has the entry None"),
    ],
)
def test_malformed_tables_are_named(fields, message):
    with pytest.raises(PlanError, match=message):
        read(**fields)


@pytest.mark.parametrize("missing", ["forward", "backward"])
def test_both_tables_are_needed(missing):
    fields = {"forward": TABLE, "backward": TABLE}
    del fields[missing]
    with pytest.raises(PlanError, match=rf"costs\['{missing}'\] is not a list of lists"):
        OpCosts.from_json(json.dumps(fields), SHAPE)
