"""Programs whose copies are wrong are refused, each with its own line."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from deepspeed_ext.plan.errors import PlanError, ScheduleDeadlock
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.programs.device import Device, check_host_copies, num_streams
from deepspeed_ext.plan.programs.host_copies import HostCopySettings
from deepspeed_ext.plan.programs.lowering import lower
from deepspeed_ext.plan.programs.program import Instruction
from deepspeed_ext.plan.schedules import breadth_first, interleaved

SHAPE = PipelineShape(4, 1, 2, num_model_chunks=2)
SETTINGS = HostCopySettings((2, 2), (0, 0, 0, 0), (1, 1, 1, 1))
NAME = "the keys and values of 0F0.0"


def moved(of: str, to: str) -> Callable[[list[Instruction]], None]:
    """An instruction that stands in front of another instead."""

    def change(steps: list[Instruction]) -> None:
        texts = list(map(str, steps))
        step = steps.pop(texts.index(of))
        steps.insert(list(map(str, steps)).index(to), step)

    return change


def left_out(what: str) -> Callable[[list[Instruction]], None]:
    return lambda steps: steps.remove(next(step for step in steps if str(step) == what))


def twice(what: str) -> Callable[[list[Instruction]], None]:
    def change(steps: list[Instruction]) -> None:
        place = list(map(str, steps)).index(what)
        steps.insert(place, steps[place])

    return change


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (moved("fetch keys and values 0F0.0", "backward 0B0.0 @0"), f"reads {NAME}, not on its device: fetch it"),
        (moved("drop keys and values 0F0.0", "forward 0F0.1 @2"), f"'forward 0F0.1 @2' of rank 0 reads {NAME}"),
        (left_out("fetch keys and values 0F0.0"), f"reads {NAME}"),
        (left_out("drop keys and values 0F0.0"), "'fetch keys and values 0F0.0' of rank 0 is out of order: offload,"),
        (twice("fetch keys and values 0F0.0"), f"drop and fetch {NAME} once each"),
        (twice("offload keys and values 0F0.0"), "'offload keys and values 0F0.0' of rank 0 is out of order"),
        (moved("drop keys and values 0F0.0", "offload keys and values 0F0.0"), "is out of order"),
    ],
)
def test_copies_out_of_place(change, line):
    program, other = lower(breadth_first, SHAPE, host_copies=SETTINGS)
    check_host_copies([program, other], SHAPE, SETTINGS)
    steps = list(program.instructions)
    change(steps)
    with pytest.raises(PlanError) as caught:
        check_host_copies([replace(program, instructions=tuple(steps)), other], SHAPE, SETTINGS)
    assert line in str(caught.value)


def test_what_nobody_fetches_is_named():
    program, _ = lower(breadth_first, SHAPE, host_copies=SETTINGS)
    cut = next(place for place, step in enumerate(program.instructions) if str(step).startswith("backward"))
    with pytest.raises(PlanError, match=r"rank 0 leaves the keys and values of 0F0\.0 on the host: fetch it before"):
        check_host_copies([replace(program, instructions=program.instructions[:cut])], SHAPE, SETTINGS)


def test_copies_have_streams_that_may_share_hardware_queues():
    shape = PipelineShape(4, 2, 4, num_model_chunks=2)
    copied = replace(SETTINGS, lengths=(2,) * 4)
    streams = num_streams(shape) + 2
    lower(interleaved, shape, host_copies=copied, device=Device(hardware_queues=streams))
    with pytest.raises(ScheduleDeadlock, match=f"{streams} streams share 1 hardware queue"):
        lower(interleaved, shape, host_copies=copied, device=Device(hardware_queues=1))
