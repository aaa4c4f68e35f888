"""Work of some ranks before the first step, such as orders of samples, for which all wait without a timeout."""

import time
from collections.abc import Callable
from threading import Thread

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from deepspeed_ext.runtime.health.ledger import OpLedger
from megatron_terapipe.checkpoint.agreement import agreed
from megatron_terapipe.errors import AgreedDataError

_INTERVAL_S, _SPEAKS_EVERY_S = 1.0, 30.0
"""Seconds until ranks ask each other again, far below any timeout, and between lines of the log."""


def any_rank(mine: bool) -> bool:
    """Whether a condition is true on any rank; a collective operation of all ranks."""
    return _last_rank(mine) >= 0


def _last_rank(mine: bool) -> int:
    """Return the last rank on which a condition is true; -1 for none."""
    found = torch.tensor(
        dist.get_rank() if mine else -1, dtype=torch.int32, device=get_accelerator().current_device_name()
    )
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return int(found.item())


def work_of_any_rank(name: str, action: Callable[[], object], ledger: OpLedger) -> None:
    """Run an action that may take long on some ranks; a collective operation of all ranks.

    A thread runs it, while a collective operation from time to time shows that all ranks are alive: a timeout ends the
    wait only for a rank that died or stopped.

    Raises:
        AgreedDataError: on every rank, if the action raises a UserError on one.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            raised.append(error)

    thread = Thread(target=run, name=name, daemon=True)
    thread.start()
    began = spoke = time.monotonic()
    working = 0
    while working >= 0:
        thread.join(min(_INTERVAL_S, 0.05 + time.monotonic() - began))
        with ledger.phase(name):
            working = _last_rank(thread.is_alive())
        if working >= 0 and dist.get_rank() == 0 and time.monotonic() - spoke > _SPEAKS_EVERY_S:
            spoke = time.monotonic()
            print(f" {name} since {spoke - began:.0f} s, on rank {working} still", flush=True)

    def raise_again() -> None:
        if raised:
            raise raised[0]

    with ledger.phase(name):
        agreed(raise_again, AgreedDataError)
