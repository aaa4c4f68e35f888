"""A rank's ledger says where the rank is, which on an accelerator is not where its host is."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from deepspeed_ext.plan.lowering import lower
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.schedules import gpipe
from deepspeed_ext.runtime.op_ledger import OpLedger

PROGRAM = lower(gpipe, PipelineShape(num_stages=2, num_micro_batches=1, num_token_slices=2))[1].instructions


class Queue:
    """An accelerator that works its queue off when it is told to."""

    def __init__(self) -> None:
        self.enqueued = self.worked_off = 0

    def mark(self) -> Callable[[], bool]:
        self.enqueued += 1
        place = self.enqueued
        return lambda: self.worked_off >= place


def test_a_host_that_computes_by_itself_is_where_it_says() -> None:
    ledger = OpLedger(1)
    assert ledger.position().doing == "" and ledger.position().total == 0
    ledger.begin("train step 1", PROGRAM)
    ledger.done()
    with ledger.waiting_for(0):
        position = ledger.position()
        assert (position.done, position.waits_for, position.doing) == (1, 0, str(PROGRAM[1]))
    assert ledger.position().waits_for is None
    assert ledger.position().total == len(PROGRAM)


def test_an_accelerator_is_where_its_queue_is() -> None:
    queue = Queue()
    ledger = OpLedger(1, queue.mark)
    ledger.begin("train step 1", PROGRAM)
    ledger.done()
    with ledger.waiting_for(0):
        pass
    ledger.done()
    found = []
    for place in range(queue.enqueued + 1):
        queue.worked_off = place
        position = ledger.position()
        found.append((position.batch, position.done, position.waits_for))
    step = "train step 1"
    assert found == [
        ("no batch yet", 0, None), (step, 0, None), (step, 1, None), (step, 1, 0), (step, 1, None), (step, 2, None),
    ]  # fmt: skip


def test_a_queue_worked_off_is_not_kept() -> None:
    queue = Queue()
    ledger = OpLedger(1, queue.mark)
    for _ in range(3):
        ledger.begin("train step 1", PROGRAM)
        for _ in PROGRAM:
            ledger.done()
        queue.worked_off = queue.enqueued
    ledger.done()
    assert len(ledger._ahead) == 1


def test_a_wait_that_failed_stays_until_the_next_batch() -> None:
    ledger = OpLedger(1)
    ledger.begin("train step 1", PROGRAM)
    with pytest.raises(RuntimeError), ledger.waiting_for(0):
        raise RuntimeError("the other end is gone")
    assert ledger.position().waits_for == 0
    ledger.begin("eval step 1", PROGRAM)
    assert ledger.position().waits_for is None


def test_the_file_says_what_the_accelerator_has_done(tmp_path: Path) -> None:
    queue = Queue()
    ledger = OpLedger(1, queue.mark)
    ledger.begin("train step 1", PROGRAM)
    for _ in PROGRAM:
        ledger.done()
    queue.worked_off = 3
    fields = json.loads(ledger.write(tmp_path, "rank 0 is behind").read_text())
    assert fields["done"] == [str(each) for each in PROGRAM[:2]]
    assert fields["done"] + fields["to_do"] == [str(each) for each in PROGRAM]
    assert fields["waiting"]["instruction"] == PROGRAM[2].kind.value
