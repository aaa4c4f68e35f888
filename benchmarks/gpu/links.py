"""Two ranks: how long a receive holds its host up when the other end comes late, and steps by hardware queues."""

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from benchmarks.gpu.machine import Sharing, has_gpu, join
from benchmarks.measuring.report import Section, progress
from benchmarks.measuring.workload import batches, benchmark_model, our_engine
from benchmarks.measuring.worlds import RankFailed, World
from deepspeed_ext.runtime.cuda_environment import HARDWARE_QUEUES
from megatron_terapipe.config.parallel.balance import balanced_token_slices

_TIMEOUT_S = 300.0


def receives(sharing: Sharing, *, delay_s: float) -> Section:
    """Post two receives on a new communicator, each before its send; return a table with a row for each.

    Args:
        sharing: how ranks share a GPU.
        delay_s: seconds from the receive to the send.
    """
    progress("receives that wait")
    table = Section(
        f"irecv posted {delay_s:g} s before its isend: what it costs the receiving host",
        ("message of the communicator", "irecv returned after, s", "message was there after, s"),
    )
    try:
        with tempfile.TemporaryDirectory() as folder, _world(sharing, build_link, folder=folder, more={}) as world:
            rows = world.run(_receives, delay_s)[0]
    except RankFailed as failed:
        table.fail("both", failed)
        return table
    for name, (returned, there) in zip(("first", "second"), rows, strict=True):
        table.add(name, f"{returned:.3f}", f"{there:.3f}")
    return table


def build_link() -> dist.ProcessGroup:
    """A communicator of two ranks that has carried nothing yet."""
    join(_TIMEOUT_S)
    group = dist.new_group([0, 1])
    dist.barrier()
    return group


def _receives(group: dist.ProcessGroup, delay_s: float) -> list[tuple[float, float]]:
    accelerator, rank = get_accelerator(), dist.get_rank()
    message = torch.ones(1024, device=accelerator.current_device_name())
    rows = []
    for _ in range(2):
        dist.barrier()
        accelerator.synchronize()
        start = time.perf_counter()
        if rank == 1:
            time.sleep(delay_s)
            work = dist.isend(message, 0, group=group)
        else:
            work = dist.irecv(message, 1, group=group)
        returned = time.perf_counter() - start
        work.wait()
        accelerator.synchronize()
        rows.append((returned, time.perf_counter() - start))
    return rows


def queues(sharing: Sharing, *, seq_length: int, rounds: int) -> Section:
    """Let worlds with different numbers of hardware queues take turns; return a table with a row for each.

    Args:
        sharing: how ranks share a GPU.
    """
    progress("steps by hardware queues")
    table = Section(
        "Steps of two ranks by hardware queues: interleaved, (P, V, M, S) = (2, 2, 4, 4)",
        (HARDWARE_QUEUES, "median s", "over 32"),
        notes=[f"Ranks share by {sharing.name}. Two ranks on one GPU show which is faster, not how fast."],
    )
    times: dict[int, list[float]] = {number: [] for number in (32, 8)}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as worlds_end:
        try:
            worlds = {}
            for number in times:
                more = {HARDWARE_QUEUES: str(number)}
                world = _world(sharing, _build_steps, seq_length, folder=folder, more=more)
                worlds[number] = worlds_end.enter_context(world)
            for turn in range(rounds + 1):
                for number, world in worlds.items():
                    seconds = max(world.run(_step))
                    times[number] += [seconds] if turn else []  # the first one warms up
        except RankFailed as failed:
            table.fail("all", failed)
            return table
    base = median(times[32])
    for number, each in times.items():
        table.add(number, f"{median(each):.4f}", f"{median(each) / base - 1:+.1%}")
    return table


def _build_steps(seq_length: int) -> Callable[[], Any]:
    join(_TIMEOUT_S)
    model = replace(benchmark_model(4), seq_length=seq_length, max_position_embeddings=seq_length)
    engine = our_engine(
        model,
        balanced_token_slices(model, 4),
        4,
        num_stages=2,
        schedule="interleaved",
        num_model_chunks=2,
        bf16=has_gpu(),
    )
    data = batches(model, for_deepspeed=False)
    return lambda: engine.train_batch(data)


def _step(step: Callable[[], Any]) -> float:
    start = time.perf_counter()
    step()
    get_accelerator().synchronize()
    return time.perf_counter() - start


def _world(sharing: Sharing, build: Callable[..., Any], *arguments: Any, folder: str, more: dict[str, str]) -> World:
    variables = [sharing.of_rank(rank, more) for rank in range(2)]
    return World(2, build, *arguments, variables=variables, timeout_s=_TIMEOUT_S, log=Path(folder, "log.txt"))
