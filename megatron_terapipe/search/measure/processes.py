"""Runs a function on the ranks of this machine, each a new process."""

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from deepspeed_ext.plan.errors import UserError
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.trials.launch.launcher import free_ports


def run_on_ranks(
    work: Callable[..., None], num_processes: int, *arguments: Any, together: bool = True
) -> Iterator[Any]:
    """Run `work(tell, *arguments)` on as many new processes, and yield what the first of them tells, as it tells it.

    Args:
        together: they can join as the ranks of one run; else each is a run of its own, at the same time.

    Raises:
        ConfigError: if a rank fails; what it said last is in the message.
    """
    context = multiprocessing.get_context("spawn")
    ports = free_ports(1 if together else num_processes)
    pipes: list[Connection] = []
    processes = []
    try:
        for rank in range(num_processes):
            here, there = context.Pipe(duplex=False)
            variables = {
                "RANK": rank if together else 0,
                "WORLD_SIZE": num_processes if together else 1,
                "LOCAL_RANK": rank,
                "LOCAL_SIZE": num_processes,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": ports[0 if together else rank],
            }
            process = context.Process(target=_rank, args=(there, variables, work, arguments), daemon=True)
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
    pipe: Connection, variables: dict[str, object], work: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    # Ctrl-C goes to all; the first process ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update({name: str(value) for name, value in variables.items()})
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
