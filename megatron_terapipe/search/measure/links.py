"""Times messages between the ranks of a process group."""

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from megatron_terapipe.search.measure.sizes import MESSAGE_BYTES
from megatron_terapipe.search.op_times.profile import ProfiledLink

REPEATS = 15


def measure_links(device: torch.device, where: str = "inside") -> list[ProfiledLink]:
    """Measure all-reduces of all ranks, and messages between the first two; every rank must call it at the same time.

    Args:
        device: device of the messages.
        where: place of the links, `inside` a node or between nodes.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    if world_size == 1:
        return []

    def all_reduce(message: torch.Tensor) -> None:
        dist.all_reduce(message)

    def there_and_back(message: torch.Tensor) -> None:
        if rank == 0:
            dist.send(message, 1)
            dist.recv(message, 1)
        elif rank == 1:
            dist.recv(message, 0)
            dist.send(message, 0)

    of_sums = tuple((size, _seconds(all_reduce, size, device)) for size in MESSAGE_BYTES)
    of_messages = tuple((size, _seconds(there_and_back, size, device) / 2) for size in MESSAGE_BYTES)
    return [
        ProfiledLink(where=where, what="all_reduce", num_ranks=world_size, points=of_sums),  # type: ignore[arg-type]
        ProfiledLink(where=where, what="transfer", num_ranks=2, points=of_messages),  # type: ignore[arg-type]
    ]


def _seconds(send: Callable[[torch.Tensor], None], num_bytes: int, device: torch.device) -> float:
    """Median, on the first rank's clock, which it gives to all."""
    message = torch.zeros(num_bytes // 4, dtype=torch.float32, device=device)
    times = []
    for _ in range(REPEATS + 2):
        dist.barrier()
        get_accelerator().synchronize()
        begun = time.perf_counter()
        send(message)
        get_accelerator().synchronize()
        times.append(time.perf_counter() - begun)
    found = torch.tensor([median(times[2:])], dtype=torch.float32, device=device)
    dist.broadcast(found, 0)
    return float(found.item())
