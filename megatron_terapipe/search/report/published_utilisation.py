"""The best published model FLOP/s utilisation (MFU) of training dense GPT models, by generation of devices.

All count as the search does: whole attention, nothing recomputed, 16-bit products over the dense peak of the data
sheet. Runs in FP8 are left out, since they are faster than this peak allows. Where one node is said to reach less than
several do, it can reach as much. With causal attention fewer FLOPs count; those follow from the shapes of the run.

                        whole   causal
    ampere    one node  64.2 %  61.8 %  MPT-7B, 2,048 tokens, 8 A100-80GB, FSDP: MosaicML llm-foundry, table of
                                        training benchmarks (scripts/train/benchmarking/README.md)
              several   56.3 %  55.9 %  GPT of 1T parameters, 2,048 tokens, 512 A100-80GB: Korthikanti et al.,
                                        arXiv 2205.05198, table 5
    hopper    any       55.4 %  52.6 %  Nemotron-4 15B, 4,096 tokens, 16 H100, Megatron-core in bf16: NVIDIA
                                        dgxc-benchmarking, throughput tables
    volta     any       40 %    40 %    512 V100: ZeRO-Infinity, arXiv 2104.07857, abstract, which may count
                                        recomputed FLOPs

For other generations no figure of a source is known here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megatron_terapipe.search.inputs.cluster import Cluster


@dataclass(frozen=True, slots=True)
class PublishedUtilization:
    """The best published MFU of a generation."""

    share: float
    """Of the peak, in [0, 1]."""
    causal_share: float
    """The same without the scores that causal attention never computes."""
    run: str
    """Which run it was, in words."""


@dataclass(frozen=True, slots=True)
class _OfGeneration:
    """On one node, and on several."""

    one_node: PublishedUtilization
    several_nodes: PublishedUtilization


def _anywhere(published: PublishedUtilization) -> _OfGeneration:
    return _OfGeneration(published, published)


PUBLISHED: Mapping[str, _OfGeneration] = MappingProxyType(
    {
        "ampere": _OfGeneration(
            PublishedUtilization(0.642, 0.618, "MPT-7B on 8 A100 with FSDP, llm-foundry"),
            PublishedUtilization(0.563, 0.559, "a GPT of 1T parameters on 512 A100, arXiv 2205.05198"),
        ),
        "hopper": _anywhere(PublishedUtilization(0.554, 0.526, "Nemotron-4 15B on 16 H100, NVIDIA dgxc-benchmarking")),
        "volta": _anywhere(PublishedUtilization(0.40, 0.40, "512 V100, arXiv 2104.07857")),
    }
)
"""By generation of devices, as in the text above."""


def best_published(cluster: Cluster) -> PublishedUtilization | None:
    """Return the best published MFU for the devices of a cluster; None for several kinds, or where none is known."""
    generations = {node.device.generation for node in cluster.nodes}
    found = PUBLISHED.get(generations.pop()) if len(generations) == 1 else None
    if found is None:
        return None
    return found.one_node if len(cluster.nodes) == 1 else found.several_nodes
