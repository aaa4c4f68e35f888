"""Processes that measure together: one for each device of this machine, joined as the ranks of a run are."""

import multiprocessing
import os
import signal
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from deepspeed_ext.plan.errors import UserError
from megatron_terapipe.errors import ConfigError

Work = Callable[[Callable[[Any], None]], None]
"""What each rank runs; it is given a function that tells the first process something."""


def run_on_ranks(work: Callable[..., None], num_processes: int, *arguments: Any) -> Iterator[Any]:
    """Run `work(tell, *arguments)` on as many new processes, and yield what the first rank tells, as it tells it.

    Args:
        work: importable by name.
        num_processes: how many.
        *arguments: sent to each.

    Raises:
        ConfigError: if a rank fails; what it said last is in the message.
    """
    context = multiprocessing.get_context("spawn")
    port = _free_port()
    pipes: list[Connection] = []
    processes = []
    try:
        for rank in range(num_processes):
            here, there = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(there, rank, num_processes, port, work, arguments), daemon=True
            )
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        yield from _heard(pipes)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _heard(pipes: list[Connection]) -> Iterator[Any]:
    running = list(pipes)
    while running:
        for pipe in wait(running):
            assert isinstance(pipe, Connection)
            try:
                kind, value = pipe.recv()
            except EOFError:
                kind, value = "failed", "it died without a word"
            if kind == "failed":
                raise ConfigError(f"rank {pipes.index(pipe)} could not measure ({value}): see the lines above")
            if kind == "done":
                running.remove(pipe)
            elif pipe is pipes[0]:
                yield value


def _rank(
    pipe: Connection, rank: int, world_size: int, port: int, work: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    # Ctrl-C goes to all; the first process ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    try:
        work(lambda value: pipe.send(("told", value)), *arguments)
        pipe.send(("done", None))
    except UserError as error:
        pipe.send(("failed", str(error)))
    except Exception as error:
        traceback.print_exc()
        with suppress(OSError):
            pipe.send(("failed", f"{type(error).__name__}: {error}"))
    # Until the parent ends it: others may still be using the store of the first.
    signal.pause()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
