"""Process groups of different sizes that take turns in one benchmark, each rank a process on a core of its own."""

import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_context = multiprocessing.get_context("spawn")


class World:
    """Ranks that hold an engine and run a step when told.

    Args:
        size: ranks.
        build: called on every rank, gives what `run` takes; importable by name.
        *arguments: of `build`.
    """

    def __init__(self, size: int, build: Callable[..., Any], *arguments: Any) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            here, there = _context.Pipe()
            process = _context.Process(target=_serve, args=(there, rank, size, port, build, arguments), daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)
        self._answers()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call `function(what was built, *arguments)` on every rank, and give what each returned."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        return self._answers()

    def seconds(self, function: Callable[..., Any]) -> float:
        """Time until all ranks are done with a function."""
        start = time.perf_counter()
        self.run(function)
        return time.perf_counter() - start

    def end(self) -> None:
        """End the ranks."""
        for process in self._processes:
            process.kill()
            process.join()

    def _answers(self) -> list[Any]:
        return [pipe.recv() for pipe in self._pipes]


def _serve(
    pipe: Connection, rank: int, size: int, port: int, build: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    built = build(*arguments)
    pipe.send(None)
    while True:
        function, passed = pipe.recv()
        pipe.send(function(built, *passed))
