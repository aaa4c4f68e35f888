"""Work in threads and processes: ahead of its consumer, in order and bounded; the death of a worker is an error.

`map_ahead` serves the loader and preprocess; `WorkerProcesses` serves preprocess.
"""

import multiprocessing
import queue
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from megatron_terapipe.errors import DataError

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_ahead(
    executor: Executor, function: Callable[[Item], Result], items: Iterable[Item], window: int
) -> Iterator[Result]:
    """Yield `function(item)` for each item, in the order of the items.

    `Executor.map` takes all items at once; here at most `window` are in work or waiting, so the items may be endless,
    and neither they nor the results fill the memory. An error of the function is raised in the place of its item.
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


class WorkerProcesses(Generic[Item, Result]):
    """Calls a function in one of several processes; as many threads as processes may call at once.

    Each process has a pipe of its own. The pool of the standard library shares one for all results: if a worker
    is killed while it writes there, all processes wait for ever.

    Example:
        >>> with WorkerProcesses(function, 2) as call, ThreadPoolExecutor(2) as threads:
        ...     results = list(threads.map(call, items))
    """

    def __init__(self, function: Callable[[Item], Result], size: int) -> None:
        self._function = function
        self._size = size
        self._idle: queue.SimpleQueue[Connection[Any, Any]] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        # Spawned, because a fork of a process with threads may deadlock.
        spawn = multiprocessing.get_context("spawn")
        self._processes = []
        self._connections = []
        for _ in range(self._size):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(theirs, self._function), daemon=True)
            process.start()
            # With this copy closed, the pipe ends when the process ends.
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
            self._idle.put(ours)
        return self

    def __call__(self, item: Item) -> Result:
        """Return `function(item)`, computed in an idle process."""
        connection = self._idle.get()
        try:
            connection.send(item)
            result, error = connection.recv()
        except (EOFError, OSError):
            raise DataError(
                f"one of {self._size} workers was killed, perhaps out of memory: use fewer --workers"
            ) from None
        finally:
            # A dead process is returned, too, so that no other call waits for it.
            self._idle.put(connection)
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection, process in zip(self._connections, self._processes, strict=True):
            connection.close()
            process.terminate()
            process.join()


def _serve(connection: "Connection[Any, Any]", function: Callable[[Any], Any]) -> None:
    """Answer items with `(result, None)` or `(None, exception)` until the other end closes."""
    try:
        while True:
            item = connection.recv()
            try:
                answer: tuple[Any, Exception | None] = (function(item), None)
            except Exception as error:
                error.add_note(traceback.format_exc())
                answer = (None, error)
            connection.send(answer)
    except (EOFError, OSError, KeyboardInterrupt):
        return
