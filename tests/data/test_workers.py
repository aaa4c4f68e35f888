"""Processes that encode: order, exceptions, and death at any moment."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron_terapipe.data.workers import WorkerProcesses, map_ahead
from megatron_terapipe.errors import DataError


def work(item: str) -> str:
    """Answer, fail or die, depending on the item."""
    if item == "fail":
        raise DataError("this item cannot be worked on")
    if item == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return item.upper()


def results(items: list[str]) -> list[str]:
    with WorkerProcesses(work, 2) as call, ThreadPoolExecutor(2) as threads:
        return list(map_ahead(threads, call, items, window=4))


def test_results_come_in_the_order_of_the_items_however_large() -> None:
    items = [letter * size for letter in "abc" for size in (1, 1 << 20)]
    assert results(items) == [item.upper() for item in items]


@pytest.mark.parametrize(("item", "message"), [("fail", "this item cannot"), ("die", "one of 2 workers was killed")])
def test_a_failure_or_a_death_is_raised(item: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        results(["a"] * 5 + [item] + ["b" * (1 << 20)] * 20)
