"""Times messages between the ranks of a process group, by the class of links that they take."""

import os
import time
from collections.abc import Callable, Iterator
from math import inf
from statistics import median

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from megatron_terapipe.search.measure.link_classes import LinkClass, Nodes, link_classes
from megatron_terapipe.search.measure.sizes import MESSAGE_BYTES
from megatron_terapipe.search.op_times.profile import ProfiledLink

REPEATS = 15
"""Timings of messages of one size, fewer where they would take longer than the size's part of the time."""

LEAST_REPEATS = 3

UNCOUNTED = 2
"""Timings of each size that come before: they warm up, and say how long one takes."""

LEAST_SIZES = 5
"""Sizes that are timed however slow a link is, up to 1 MiB: networks that limit a rate let short messages pass."""

AT_ONCE = 4
"""Short messages that one timing sends one after the other: ranks leave a barrier at different times."""

SHORT_BYTES = 2**18


def nodes_of_ranks() -> Nodes:
    """Return the ranks of each node, as their launcher numbers the nodes; every rank must call it at the same time."""
    mine = int(os.environ.get("CROSS_RANK", "0"))
    found: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return [[rank for rank, node in enumerate(found) if node == each] for each in sorted(set(found))]


def measure_links(
    device: torch.device, nodes: Nodes, doing: Callable[[str], None] = lambda _: None, budget_s: float = inf
) -> list[ProfiledLink]:
    """Measure every class of links between ranks; every rank must call it at the same time.

    Args:
        budget_s: seconds for all classes together, the same on every rank; on a slow link the longest messages, which
            tell no more of it than shorter ones, are left out.
    """
    if dist.get_world_size() == 1:
        return []
    classes = list(link_classes(nodes))
    return [_measured(each, device, doing, budget_s / len(classes)) for each in classes]


def _measured(links: LinkClass, device: torch.device, doing: Callable[[str], None], budget_s: float) -> ProfiledLink:
    doing(links.words)
    rank = dist.get_rank()
    # Every rank must name every group, in the same order.
    made = [(ranks, dist.new_group(list(ranks))) for ranks in links.groups]
    mine = next(((ranks, group) for ranks, group in made if rank in ranks), None)

    def send(message: torch.Tensor) -> None:
        if mine is None:
            return
        ranks, group = mine
        if links.what == "all_reduce":
            dist.all_reduce(message, group=group)
        elif rank == ranks[0]:
            dist.send(message, ranks[1], group=group)
            dist.recv(message, ranks[1], group=group)
        else:
            dist.recv(message, ranks[0], group=group)
            dist.send(message, ranks[0], group=group)

    ways = 2 if links.what == "transfer" else 1
    points = tuple((size, seconds / ways) for size, seconds in _points(send, device, budget_s))
    for _, group in made:
        if mine is not None and group is mine[1]:
            dist.destroy_process_group(group)
    return ProfiledLink(
        where=links.where,
        what=links.what,
        num_ranks=len(links.groups[0]),
        points=points,
        ranks_per_node=links.ranks_per_node,
        flows=links.flows,
    )


def _points(send: Callable[[torch.Tensor], None], device: torch.device, budget_s: float) -> Iterator[tuple[int, float]]:
    """Yield (bytes, seconds) of messages; the slowest group's, median over repeats."""
    spent_s = byte_s = 0.0
    for number, size in enumerate(MESSAGE_BYTES):
        # All ranks go by times that they have agreed on, not by their clocks.
        if number >= LEAST_SIZES and spent_s + (UNCOUNTED + LEAST_REPEATS) * size * byte_s > budget_s:
            return
        message = torch.zeros(size // 4, dtype=torch.float32, device=device)
        count = AT_ONCE if size <= SHORT_BYTES else 1
        _timed(send, message, count)
        (once,) = _slowest([_timed(send, message, count)], device)
        wanted = budget_s / len(MESSAGE_BYTES) / max(once * count, 1e-9)
        repeats = int(max(min(REPEATS, wanted), min(LEAST_REPEATS, REPEATS)))
        yield size, median(_slowest([_timed(send, message, count) for _ in range(repeats)], device))
        spent_s += (UNCOUNTED + repeats) * once * count
        byte_s = once / size


def _timed(send: Callable[[torch.Tensor], None], message: torch.Tensor, count: int) -> float:
    """Seconds of one of several messages of this rank."""
    dist.barrier()
    get_accelerator().synchronize()
    begun = time.perf_counter()
    for _ in range(count):
        send(message)
    get_accelerator().synchronize()
    return (time.perf_counter() - begun) / count


def _slowest(times: list[float], device: torch.device) -> list[float]:
    """Return the longest time of any rank, of each repeat."""
    found = torch.tensor(times, dtype=torch.float32, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return [float(each) for each in found.tolist()]
