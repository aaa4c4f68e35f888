"""The ledger has the position of a rank, which on an accelerator differs from that of its host."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.programs.lowering import lower
from deepspeed_ext.plan.programs.program import COMPUTES, InstructionKind
from deepspeed_ext.plan.schedules import gpipe
from deepspeed_ext.runtime.health import ledger as op_ledger
from deepspeed_ext.runtime.health.ledger import Mark, OpLedger, accelerator_mark

PROGRAM = lower(gpipe, PipelineShape(num_stages=2, num_micro_batches=1, num_token_slices=2))[1].instructions


class Queue:
    """An accelerator whose queue is worked off step by step, and has room for some marks."""

    def __init__(self, room: int = 100) -> None:
        self.enqueued = self.worked_off = 0
        self._room, self._moved = room, threading.Condition()

    def mark(self) -> Callable[[], None]:
        with self._moved:
            assert self._moved.wait_for(lambda: self.enqueued - self.worked_off < self._room, timeout=30)
            self.enqueued += 1
            place = self.enqueued

        def wait() -> None:
            with self._moved:
                assert self._moved.wait_for(lambda: self.worked_off >= place, timeout=30)

        return wait

    def work_off(self, place: int) -> None:
        with self._moved:
            self.worked_off = place
            self._moved.notify_all()


@contextmanager
def followed(mark: Mark) -> Iterator[OpLedger]:
    """A ledger with its thread, while all that is enqueued comes to an end."""
    ledger, ended = OpLedger(1, mark), threading.Event()
    thread = threading.Thread(target=ledger.follow, args=(ended, 0.001))
    thread.start()
    until(lambda: ledger._followed)
    yield ledger
    ended.set()
    thread.join()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.001)


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
    queue = Queue()
    with followed(queue.mark) as ledger:
        ledger.begin("train step 1", PROGRAM)
        while PROGRAM[ledger._on_host.done].kind is not InstructionKind.FORWARD:
            ledger.done()  # to load and to post takes the accelerator no time
        first = ledger._on_host.done
        with ledger.waiting_for(0):
            pass
        for _ in range(4):
            ledger.done()  # both forwards, a backward, and the post of its message
        step = "train step 1"
        assert ledger.position().batch == "no batch yet"
        for place, expected in enumerate(
            [(step, first, 0), (step, first, None), (step, first + 1, None), (step, first + 2, None),
             (step, first + 4, None)], start=1,
        ):  # fmt: skip
            queue.work_off(place)
            until(lambda: ((at := ledger.position()).batch, at.done, at.waits_for) == expected)  # noqa: B023


def test_a_host_blocked_by_a_full_queue_is_reported() -> None:
    """The position can be read though the host is in the middle of a call that enqueues, and names where."""
    queue = Queue(room=2)
    with followed(queue.mark) as ledger:
        ops = [str(each) for each in PROGRAM if each.kind in COMPUTES]

        def host() -> None:
            ledger.begin("train step 1", PROGRAM)
            for _ in PROGRAM:
                ledger.done()

        thread = threading.Thread(target=host)
        thread.start()
        queue.work_off(1)
        until(lambda: ledger.position().doing == ops[0] and queue.enqueued == 3)
        until(lambda: ledger.position().host_blocked_at != "")
        position = ledger.position()
        assert position.host_blocked_at == ops[2] and position.waits_for is None
        assert f"its host at '{ops[2]}' (the device's queue is full, or a kernel is loaded)" in str(position)
        queue.work_off(100)
        thread.join()
        until(lambda: ledger.position().done == len(PROGRAM))
        assert ledger.position().host_blocked_at == ""


def test_a_ledger_without_its_thread_has_the_place_of_the_host() -> None:
    queue = Queue()
    ledger = OpLedger(1, queue.mark)
    with ledger.waiting_for(0):
        assert ledger.position().waits_for == 0
    assert ledger.position().waits_for is None and not queue.enqueued


def test_events_are_reused_once_they_were_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Event:
        def __init__(self, *, blocking: bool) -> None:
            assert blocking, "the thread that waits sleeps"
            self.recorded = 0
            made.append(self)

        def record(self) -> None:
            self.recorded += 1

        def synchronize(self) -> None:
            if len(made) == 5 and sum(event.recorded for event in made) > 15:
                raise RuntimeError("a failure of the device, which the host finds too")

    accelerator = SimpleNamespace(is_synchronized_device=lambda: False, Event=Event, device_name=lambda: "cuda")
    monkeypatch.setattr(op_ledger, "get_accelerator", lambda: accelerator)
    mark = accelerator_mark()
    assert mark is not None
    with followed(mark) as ledger:
        for _ in range(4):
            ledger.begin("train step 1", PROGRAM)
            until(lambda: ledger.position().doing != "")
            for _ in PROGRAM:
                ledger.done()
            until(lambda: ledger.position().done == len(PROGRAM))
    assert sum(event.recorded for event in made) == 4 * (1 + 4) and len(made) <= 2 * (1 + 4)


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
    with followed(queue.mark) as ledger:
        ledger.begin("train step 1", PROGRAM)
        for _ in PROGRAM:
            ledger.done()
        # Begun, and one forward done; to load and to post before it took the accelerator no time.
        done = [each.kind for each in PROGRAM].index(InstructionKind.FORWARD) + 1
        queue.work_off(2)
        until(lambda: ledger.position().done == done)
        seen = replace(ledger.position(), seconds=12.5, code="channels.py:176 wait")
        fields = json.loads(ledger.write(tmp_path, "rank 0 blocks the run", seen).read_text())
        assert fields["done"] == [str(each) for each in PROGRAM[:done]]
        assert fields["done"] + fields["to_do"] == [str(each) for each in PROGRAM]
        assert fields["waiting"]["instruction"] == PROGRAM[done].kind.value
        assert fields["position"]["seconds"] == 12.5 and fields["position"]["code"] == "channels.py:176 wait"
        # It moves on between the last look at it and the file.
        queue.work_off(3)
        until(lambda: ledger.position().done > done)
        assert json.loads(ledger.write(tmp_path, "", seen).read_text())["position"]["seconds"] == 0.0
        queue.work_off(100)
