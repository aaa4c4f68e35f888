import pytest
from hypothesis import given

from deepspeed_ext.plan.errors import PlanError, ScheduleDeadlock
from deepspeed_ext.plan.ops import Op, PipelineShape, Placement
from deepspeed_ext.plan.programs.lowering import lower
from deepspeed_ext.plan.schedule_file import parse_schedule, read_schedule, schedule_from_file, write_schedule
from deepspeed_ext.plan.schedules import one_f_one_b, rank_orders
from tests.strategies import orders_of_pipelines


def ops(text: str) -> list[Op]:
    return [Op.parse(word) for word in text.split()]


DRAWN = """\
# two ranks, one micro-batch of two token slices

0F0.0, 0F0.1,      ,      , 0B0.1, 0B0.0   # the first stage
     , 1F0.0, 1F0.1, 1B0.1, 1B0.0,
"""


def test_a_file_by_hand():
    assert parse_schedule(DRAWN) == (
        PipelineShape(2, 1, 2),
        [ops("0F0.0 0F0.1 0B0.1 0B0.0"), ops("1F0.0 1F0.1 1B0.1 1B0.0")],
    )
    assert parse_schedule(DRAWN.replace(",", " ")) == parse_schedule(DRAWN)
    assert parse_schedule(DRAWN.replace("\n", "\r\n")) == parse_schedule(DRAWN)


def test_the_csv_of_torch_distributed_pipelining():
    # In the form of torch's own files: letters I and W, empty cells, no token slices.
    text = "0F0,0F1,,0I0,0W0,0I1,0W1\n,1F0,1I0,1W0,1F1,1I1,1W1\n"
    shape, orders = parse_schedule(text)
    assert shape == PipelineShape(2, 2, 1)
    assert orders == [ops("0F0 0F1 0BI0 0BW0 0BI1 0BW1"), ops("1F0 1BI0 1BW0 1F1 1BI1 1BW1")]


@pytest.mark.parametrize(
    "text, placement",
    [
        ("0F0 2F0 2B0 0B0\n1F0 3F0 3B0 1B0\n", Placement.LOOPED),
        ("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0\n", Placement.V),
        ("0F0 1F0 1B0 0B0\n", Placement.LOOPED),  # one rank: both are the same
    ],
)
def test_the_placement_follows_from_the_lines_of_stages(text, placement):
    shape, _ = parse_schedule(text)
    assert (shape.placement, shape.num_model_chunks) == (placement, 2)


@given(orders_of_pipelines())
def test_written_schedules_read_back(orders_and_shape):
    orders, shape = orders_and_shape
    again, orders_again = parse_schedule(write_schedule(orders))
    assert orders_again == orders
    owners = [[each.rank_of(stage) for stage in range(each.num_stages)] for each in (shape, again)]
    assert owners[0] == owners[1]


def test_a_file_is_a_schedule(tmp_path):
    shape = PipelineShape(3, 4, 2)
    path = tmp_path / "schedule.csv"
    # As a spreadsheet saves it.
    path.write_bytes(b'\xef\xbb\xbf"0F0","0B0"\r\n"1F0","1B0"\r\n')
    assert read_schedule(path) == (PipelineShape(2, 1), [ops("0F0 0B0"), ops("1F0 1B0")])
    path.write_text("0F0 0B0 0F1 0B1\n1F0 1F1 1B1 1B0\n")
    with pytest.raises(ScheduleDeadlock, match=r"schedule\.csv: the schedule deadlocks: rank 0 at 0B0\.0 waits for"):
        read_schedule(path)
    path.write_text(write_schedule(rank_orders(one_f_one_b, shape)))
    schedule = schedule_from_file(path)
    assert read_schedule(path) == (shape, rank_orders(one_f_one_b, shape))
    assert rank_orders(schedule, shape) == rank_orders(one_f_one_b, shape)
    assert lower(schedule, shape) == lower(one_f_one_b, shape)
    message = (
        r"schedule\.csv is for 3 stages, 4 micro-batches, 2 token slices, and the run has "
        r"3 stages, 4 micro-batches, 1 token slice:"
    )
    with pytest.raises(PlanError, match=message):
        rank_orders(schedule, PipelineShape(3, 4, 1))
