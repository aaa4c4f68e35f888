"""Runs a function on several ranks, each a process, over gloo."""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from megatron_terapipe.search.machine.launcher import free_port

# Children are forked from a server that has imported the heavy packages once.
fork_server = multiprocessing.get_context("forkserver")
fork_server.set_forkserver_preload(["tests.preloaded"])

TIMEOUT_S = 240
LINGER_S = 3


class RankFailed(AssertionError):
    """A rank raised; the message is its traceback."""


def run_distributed(function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """Call `function(*arguments)` on every rank of a process group, and return the results by rank.

    Args:
        function: importable by name; may use `torch.distributed` and `deepspeed` at once.

    Raises:
        RankFailed: if a rank raised, died or took longer than `TIMEOUT_S`; the others are killed.
    """
    port = free_port()
    pipes, processes = [], []
    for rank in range(world_size):
        receiver, sender = fork_server.Pipe(duplex=False)
        process = fork_server.Process(
            target=_rank, args=(sender, rank, world_size, port, function, arguments), daemon=True
        )
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    try:
        return _collect(pipes)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(pipes: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        ready = wait([pipe for rank, pipe in enumerate(pipes) if rank not in results], timeout=TIMEOUT_S)
        if not ready:
            raise RankFailed(
                f"ranks {sorted(set(range(len(pipes))) - results.keys())} did not return within {TIMEOUT_S} s"
            )
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                ok, value = pipe.recv()
            except EOFError:
                raise RankFailed(f"rank {rank} died") from None
            if not ok:
                raise RankFailed(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _rank(
    sender: Connection, rank: int, world_size: int, port: int, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    try:
        import torch

        from deepspeed_ext.runtime.initialize import init_distributed

        torch.set_num_threads(1)
        init_distributed(dist_backend="gloo")
        sender.send((True, function(*arguments)))
    except BaseException:
        sender.send((False, traceback.format_exc()))
    finally:
        sender.close()
        # Rank 0 serves the store that slower ranks may still read. The parent ends all once it has all results; but a
        # rank that waits for one that failed must lose its connection.
        time.sleep(LINGER_S)
        os._exit(0)
