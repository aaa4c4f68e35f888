"""Runs a function on several ranks, each a process, over gloo."""

import gc
import multiprocessing
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest.mock import patch

from megatron_terapipe.launch.launcher import free_port

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


def run_each(function: Callable[[Any], Any], world_size: int, items: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Call `function(item)` for one item after another on every rank of one launch; results by item, then by rank."""
    return list(zip(*run_distributed(one_by_one, world_size, function, items), strict=True))


def results_by_setup(function: Callable[[Any], Any], setups: Sequence[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a look-up of the results of `function(setup)` by rank; one launch serves all setups of a world size."""

    @cache
    def launched(world_size: int) -> dict[Any, tuple[Any, ...]]:
        chosen = [setup for setup in setups if setup.world_size == world_size]
        return dict(zip(chosen, run_each(function, world_size, chosen), strict=True))

    return lambda setup: launched(setup.world_size)[setup]


def one_by_one(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """On each rank of a launch: results of `function(item)` by item. The process groups of an item serve the next ones.

    To make those of an engine takes a fifth of the time of its first step, and each has three threads, one of which
    wakes a hundred times a second.
    """
    import torch.distributed as dist

    results, made = [], {}
    for item in items:
        with patch.object(dist, "new_group", _reusing(dist.new_group, made)):
            results.append(function(item))
        # A slower rank may still need the messages of its groups.
        dist.barrier()
    return results


def _reusing(new_group: Callable[..., Any], made: dict[Any, Any]) -> Callable[..., Any]:
    """Return `new_group` for one item, whose nth call for some ranks returns the nth group made for them before."""
    calls: Counter[Any] = Counter()

    def call(ranks: Sequence[int] | None = None, *arguments: Any, **keywords: Any) -> Any:
        key = None if ranks is None else tuple(ranks), repr((arguments, keywords))
        calls[key] += 1
        numbered = *key, calls[key]
        if numbered not in made:
            made[numbered] = new_group(ranks, *arguments, **keywords)
        return made[numbered]

    return call


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
    # What the function has imported stays. DeepSpeed collects garbage several times for each engine: elsewhere the
    # finalizer of an earlier engine could import modules while the import of another one is on its way (gh-106176).
    gc.freeze()
    gc.disable()
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
