"""The ledger has the position of a rank, which on an accelerator differs from that of its host."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.programs.lowering import lower
from deepspeed_ext.plan.programs.program import InstructionKind
from deepspeed_ext.plan.schedules import gpipe
from deepspeed_ext.runtime.health import ledger as op_ledger
from deepspeed_ext.runtime.health.ledger import OpLedger, accelerator_mark

PROGRAM = lower(gpipe, PipelineShape(num_stages=2, num_micro_batches=1, num_token_slices=2))[1].instructions


class Queue:
    """An accelerator whose queue is worked off step by step."""

    def __init__(self) -> None:
        self.enqueued = self.worked_off = 0

    def mark(self) -> Callable[[], bool]:
        self.enqueued += 1
        place = self.enqueued
        return lambda: self.worked_off >= place


def test_position_without_an_accelerator() -> None:
    ledger = OpLedger(1)
    assert ledger.position().doing == "" and ledger.position().total == 0
    ledger.begin("train step 1", PROGRAM)
    ledger.done()
    with ledger.waiting_for(0):
        position = ledger.position()
        assert (position.done, position.waits_for, position.doing) == (1, 0, str(PROGRAM[1]))
    assert ledger.position().waits_for is None
    assert ledger.position().total == len(PROGRAM)


def test_position_of_an_accelerator() -> None:
    queue, arrived = Queue(), []
    ledger = OpLedger(1, queue.mark)
    ledger.begin("train step 1", PROGRAM)
    while PROGRAM[ledger._on_host.done].kind is not InstructionKind.FORWARD:
        ledger.done()  # to load and to post takes the accelerator no time
    first = ledger._on_host.done
    with ledger.waiting_for(0, over=lambda: bool(arrived)):
        pass
    for _ in range(4):
        ledger.done()  # both forwards, a backward, and the post of its message
    found = []
    for place, has_come in ((0, False), (1, False), (1, True), (2, True), (3, True), (4, True)):
        queue.worked_off = place
        arrived[:] = [True] * has_come
        position = ledger.position()
        found.append((position.batch, position.done, position.waits_for))
    step = "train step 1"
    assert found == [
        ("no batch yet", 0, None), (step, first, 0), (step, first, None),
        (step, first + 1, None), (step, first + 2, None), (step, first + 4, None),
    ]  # fmt: skip


def test_a_wait_without_an_end_of_its_own_is_marked() -> None:
    queue = Queue()
    ledger = OpLedger(1, queue.mark)
    with ledger.waiting_for(0):
        pass
    assert ledger.position().waits_for == 0
    queue.worked_off = queue.enqueued
    assert ledger.position().waits_for is None


def test_events_are_reused_once_they_were_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Event:
        def __init__(self) -> None:
            self.recorded = 0
            made.append(self)

        def record(self) -> None:
            self.recorded += 1

        def query(self) -> bool:
            return True

    accelerator = SimpleNamespace(is_synchronized_device=lambda: False, Event=Event)
    monkeypatch.setattr(op_ledger, "get_accelerator", lambda: accelerator)
    ledger = OpLedger(1, accelerator_mark())
    for _ in range(3):
        ledger.begin("train step 1", PROGRAM)
        for _ in PROGRAM:
            ledger.done()
    assert [event.recorded for event in made] == [3 * (1 + 4)]


def test_a_wait_that_failed_stays_until_the_next_batch() -> None:
    ledger = OpLedger(1)
    ledger.begin("train step 1", PROGRAM)
    with pytest.raises(RuntimeError), ledger.waiting_for(0):
        raise RuntimeError("the other end is gone")
    assert ledger.position().waits_for == 0
    ledger.begin("eval step 1", PROGRAM)
    assert ledger.position().waits_for is None


def test_the_file_has_the_position_of_the_accelerator(tmp_path: Path) -> None:
    queue = Queue()
    ledger = OpLedger(1, queue.mark)
    ledger.begin("train step 1", PROGRAM)
    for _ in PROGRAM:
        ledger.done()
    # Begun, and one forward done; to load and to post before it took the accelerator no time.
    done = [each.kind for each in PROGRAM].index(InstructionKind.FORWARD) + 1
    queue.worked_off = 2
    seen = replace(ledger.position(), seconds=12.5, code="channels.py:176 wait")
    fields = json.loads(ledger.write(tmp_path, "rank 0 blocks the run", seen).read_text())
    assert fields["done"] == [str(each) for each in PROGRAM[:done]]
    assert fields["done"] + fields["to_do"] == [str(each) for each in PROGRAM]
    assert fields["waiting"]["instruction"] == PROGRAM[done].kind.value
    assert fields["position"]["seconds"] == 12.5 and fields["position"]["code"] == "channels.py:176 wait"
    # It moves on between the last look at it and the file.
    queue.worked_off = 3
    assert json.loads(ledger.write(tmp_path, "", seen).read_text())["position"]["seconds"] == 0.0
