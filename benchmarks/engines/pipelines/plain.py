"""The model in one process without a pipeline: what a step costs at all."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from benchmarks.engines.pipelines.engine import Engine, Job, sgd
from benchmarks.engines.pipelines.plain_gpt import Stage, mean_loss, plain_layers


def plain(job: Job, *, threads: int) -> Engine:
    """Return plain torch on the first rank, while the others do nothing.

    Args:
        threads: threads that share each operation.
    """
    if dist.get_rank():
        nothing = torch.nn.Parameter(torch.zeros(1))
        return Engine({}, torch.optim.SGD([nothing], lr=1e-3), lambda: None)
    layers = plain_layers(job.model)
    whole = Stage(layers, 0, len(layers))
    weights = whole.named_weights()
    optimizer, data = sgd(weights), job.micro_batches()

    def step() -> float:
        total = 0.0
        for inputs, labels in data:
            loss = mean_loss(whole(inputs), labels) / len(data)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return Engine(weights, optimizer, step if threads == 1 else _with_threads(step, threads, job.cores))


def _with_threads(step: Callable[[], float], threads: int, cores: frozenset[int]) -> Callable[[], float]:
    def wrapped() -> float:
        with _spread(threads, cores):
            return step()

    return wrapped


@contextmanager
def _spread(threads: int, cores: frozenset[int]) -> Iterator[None]:
    """Compute on these cores with so many threads, and then again on the core of this rank with one."""
    own = os.sched_getaffinity(0)
    # Threads inherit the cores of the one that makes them, so the cores come first.
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(1)
        os.sched_setaffinity(0, own)
