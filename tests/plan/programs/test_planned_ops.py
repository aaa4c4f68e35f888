"""A step that would take hours or all memory to plan is refused before any of it is planned."""

import pytest

from deepspeed_ext.plan.command import main
from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import PipelineShape, check_num_ops, slow_planning
from deepspeed_ext.plan.programs.lowering import SimulatedSchedule, check_lowering
from deepspeed_ext.plan.schedules import SCHEDULES


@pytest.mark.parametrize("shape", [(16, 1024, 64), (1, 100_000, 1), (10_000, 1024, 1), (64, 4096, 32), (4, 8, 16_384)])
def test_what_people_run_is_planned(shape: tuple[int, int, int]) -> None:
    check_num_ops(PipelineShape(*shape))


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((1, 10**9, 1), "stages 1 x micro-batches 1000000000 x token slices 1 make a step of 2,000,000,000 forwards"),
        ((4, 200_000, 64), "102,400,000 forwards and backwards, more than the 33,554,432 that can be planned: give"),
        ((1, 2**20, 1), "2,097,152 forwards and backwards on each rank, more than the 1,048,576 that can be planned"),
    ],
)
def test_more_is_refused(shape: tuple[int, int, int], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        check_num_ops(PipelineShape(*shape))
    with pytest.raises(PlanError, match=said):
        check_lowering(SimulatedSchedule.of(SCHEDULES["1f1b"]), PipelineShape(*shape))


def test_what_takes_long_is_said() -> None:
    assert slow_planning(PipelineShape(16, 1024, 64)) is None
    line = "planning a step of 8,388,608 forwards and backwards takes about 17 s"
    assert slow_planning(PipelineShape(64, 1024, 64)) == line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--stages 1000000000 --micro-batches 1", "--stages 1000000000 is more than 10,000: give 10,000 or less"),
        ("--stages 2 --micro-batches 1 --token-slices 1000000000000", "--token-slices 1000000000000 is more than"),
        ("--stages 1000 --micro-batches 10000", "make a step of 20,000,000 forwards and backwards, more than"),
    ],
)
def test_the_command_says_so(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--schedule", "1f1b", *words.split()]) == 2
    assert said in capsys.readouterr().err
