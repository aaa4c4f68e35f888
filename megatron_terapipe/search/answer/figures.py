"""Figures that follow from a prediction, and the best published ones of the same kind."""

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from megatron_terapipe.config.flops import BACKWARD_PER_FORWARD
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.machine.library import is_guess
from megatron_terapipe.search.price.price_document import Speed
from megatron_terapipe.search.price.workload import Workload
from megatron_terapipe.search.rank.space import SearchProblem
from megatron_terapipe.strategy import Strategy


def model_flops(workload: Workload, *, causal: bool = False) -> float:
    """Return the FLOPs of one sequence, forward and backward, counted as the trainer's `iteration_flops` counts."""
    return (1.0 + BACKWARD_PER_FORWARD) * sum(layer.model_flops(causal=causal) for layer in workload.layers)


def speed_of(problem: SearchProblem, strategy: Strategy, iteration_time_s: float) -> Speed:
    """Return the published figures that follow from the seconds of an iteration.

    The MFU is defined by Chowdhery et al. (arXiv 2204.02311 appendix B), over the peak of the devices in use.
    """
    workload, nodes = problem.workload, problem.cluster.nodes
    tokens_per_s = strategy.num_sequences * workload.seq_length / iteration_time_s
    flops, causal_flops = (
        model_flops(workload, causal=causal) * strategy.num_sequences / iteration_time_s for causal in (False, True)
    )
    used = nodes_in_use(strategy, problem.cluster).items()
    peak = sum(count * nodes[index].device.peak_flops(problem.precision) for index, count in used)
    peak_is_known = not any(map(is_guess, {node.device.name for node in nodes}))
    mfu, mfu_causal = (each / peak if peak else 0.0 for each in (flops, causal_flops))
    return Speed(
        iteration_time_s=iteration_time_s,
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_device=tokens_per_s / strategy.world_size,
        tflops_per_device=flops / strategy.world_size / 1e12,
        tflops_per_device_causal=causal_flops / strategy.world_size / 1e12,
        mfu=mfu if peak_is_known else None,
        mfu_causal=mfu_causal if peak_is_known else None,
    )


def nodes_in_use(strategy: Strategy, cluster: Cluster) -> Counter[int]:
    """Return the number of devices with a rank of each node, by its index."""
    of_device = cluster.node_of_device
    if strategy.placement is None:
        return Counter(of_device[: strategy.world_size])
    return Counter(of_device[place] for place in strategy.placement if place < len(of_device))


def devices_of(cluster: Cluster, strategy: Strategy | None = None) -> dict[str, int]:
    """Return the number of devices of each kind; `strategy`: only those that have a rank."""
    found: Counter[str] = Counter()
    used = Counter(cluster.node_of_device) if strategy is None else nodes_in_use(strategy, cluster)
    for index, number in used.items():
        found[cluster.nodes[index].device.name] += number
    return dict(found)


class PublishedUtilization(NamedTuple):
    """The best published MFU of a generation of devices, of training a dense GPT.

    All figures count whole attention, no recomputation, 16-bit products over the dense peak of the data sheet; runs in
    FP8 are left out, since they are faster than this peak. Other generations have no published figure here.
    """

    share: float
    """Of the peak, in [0, 1], with full attention."""
    causal_share: float
    """The same without the scores that causal attention never computes; it follows from the shapes of the run."""
    run: str
    """Which run it was, in words."""


# 2,048 tokens: abstract.
LLAMA = PublishedUtilization(0.705, 0.684, "Llama 13B on A100, arXiv 2311.05610")
# 8,192 tokens, Megatron-core in bf16: step times in the repository's tables, 12.27 s for 128 sequences (v25.04).
LLAMA_8B = PublishedUtilization(0.625, 0.555, "Llama 3.1 8B on 8 H100, NVIDIA dgxc-benchmarking")
LLAMA_405B = PublishedUtilization(0.460, 0.442, "Llama 3.1 405B on 128 GB200, NVIDIA dgxc-benchmarking")
# Abstracts, which may count recomputed FLOPs.
ZERO_INFINITY = PublishedUtilization(0.40, 0.40, "512 V100, arXiv 2104.07857")
FRONTIER = PublishedUtilization(0.384, 0.384, "a GPT of 22B on MI250X, arXiv 2312.12705")
PUBLISHED: Mapping[str, PublishedUtilization] = MappingProxyType(
    {"ampere": LLAMA, "hopper": LLAMA_8B, "blackwell": LLAMA_405B, "volta": ZERO_INFINITY, "cdna2": FRONTIER}
)
"""By generation of devices, on any number of nodes."""

TOLERANCE = 0.03
"""Share of the peak by which a prediction may be above the best published one without a doubt."""


def best_published(cluster: Cluster) -> PublishedUtilization | None:
    """Return the best published MFU for the devices of a cluster; None for several kinds, or where none is known."""
    return PUBLISHED.get(next(iter(cluster.generations))) if len(cluster.generations) == 1 else None
