"""The best published MFU of each generation of devices, beside which answers put theirs.

All figures are of training dense GPT models, and count whole attention, no recomputation, 16-bit products over the
dense peak of the data sheet; runs in FP8 are left out, since they are faster than this peak. With causal attention
fewer FLOPs count; those follow from the shapes of the run. Other generations have no published figure here.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from megatron_terapipe.search.machine.cluster import Cluster


class PublishedUtilization(NamedTuple):
    """The best published MFU of a generation."""

    share: float
    """Of the peak, in [0, 1], with full attention."""
    causal_share: float
    """The same without the scores that causal attention never computes."""
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
