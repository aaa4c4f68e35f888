"""Actions of the first rank for all ranks, faults that all ranks raise at the same time, and waits for long work."""

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Thread
from typing import Any, TypeVar, cast

import torch.distributed as dist

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.runtime.health.ledger import OpLedger
from deepspeed_ext.runtime.topology import last_rank
from megatron_terapipe.errors import AgreedCheckpointError, AgreedDataError, CheckpointError

Result = TypeVar("Result")


def from_first_rank(
    action: Callable[[], Result],
    *,
    group: dist.ProcessGroup | None = None,
    error: type[AgreedCheckpointError] = AgreedCheckpointError,
) -> Result:
    """Return on every rank the result of an action on the first; every rank must call it at the same time.

    Args:
        group: of all ranks; None for the group of the run.
    """
    found: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            found = [action(), None]
        except (CheckpointError, OSError) as fault:
            found = [None, str(fault)]
    dist.broadcast_object_list(found, src=0, group=group)
    if found[1] is not None:
        raise error(found[1])
    return found[0]


def agreed(make: Callable[[], Result], error: type[UserError], *, of: type[UserError] = UserError) -> Result:
    """Return a function's result on this rank; every rank must call it at the same time.

    Raises:
        error: on every rank, with the message of the first rank on which the function raises an `of`.
    """
    result, mine = None, None
    try:
        result = make()
    except of as raised:
        mine = str(raised)
    if fault := first_fault(mine):
        raise error(fault)
    return cast(Result, result)


def first_fault(mine: str | None) -> str | None:
    """Return the fault of the first rank that has one; every rank must call it at the same time."""
    faults: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(faults, mine)
    return next((fault for fault in faults if fault is not None), None)


_INTERVAL_S, _SPEAKS_EVERY_S = 1.0, 30.0
"""Seconds until ranks ask each other again, far below any timeout, and between lines of the log."""


def work_of_any_rank(name: str, action: Callable[[], object], ledger: OpLedger) -> None:
    """Run an action that may take long on some ranks before the first step; a collective operation of all ranks.

    A thread runs it, while a collective operation from time to time shows that all ranks are alive: a timeout ends the
    wait only for a rank that died or stopped.

    Raises:
        AgreedDataError: on every rank, if the action raises a UserError on one.
    """
    result = in_daemon(name, action)
    began = spoke = time.monotonic()
    working = 0
    while working >= 0:
        wait([result], min(_INTERVAL_S, 0.05 + time.monotonic() - began))
        with ledger.phase(name):
            working = last_rank(not result.done())
        if working >= 0 and dist.get_rank() == 0 and time.monotonic() - spoke > _SPEAKS_EVERY_S:
            spoke = time.monotonic()
            print(f" {name} since {spoke - began:.0f} s, on rank {working} still", flush=True)
    with ledger.phase(name):
        agreed(result.result, AgreedDataError)


def in_daemon(name: str, action: Callable[[], Result]) -> Future[Result]:
    """Run an action in a thread for whose end no process waits; its result or error is in the future."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return future
