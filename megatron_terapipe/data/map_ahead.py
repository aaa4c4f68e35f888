"""Work done ahead of its consumer, in order and bounded: the loader's and preprocess's one loop."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_ahead(
    executor: Executor, function: Callable[[Item], Result], items: Iterable[Item], window: int
) -> Iterator[Result]:
    """Yield `function(item)` for each item, in the order of the items.

    `Executor.map` takes all items at once; here at most `window` are in work or waiting, so the
    items may be endless and neither they nor the results pile up in memory.

    Args:
        window: most items submitted and not yet yielded, at least 1.

    Raises:
        BaseException: whatever the function raised, at the place of its item; the iteration ends.
    """
    pending: deque[Future[Result]] = deque()
    try:
        for item in items:
            pending.append(executor.submit(function, item))
            if len(pending) == window:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()
