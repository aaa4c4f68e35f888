"""The predicted MFU of a strategy beside the best published one, and the constant that it rests on.

Published model FLOP/s utilisations (MFU) of training dense GPT models, by generation of devices. All count as the
search
does: whole attention, nothing recomputed, 16-bit products over the dense peak of the data sheet. Runs in FP8 are left
out, since they are faster than this peak allows. Where one node is said to reach less than several do, it can reach as
much. With causal attention fewer FLOPs count; those follow from the shapes of the run.

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
from math import exp, log, log1p
from types import MappingProxyType
from typing import NamedTuple

from megatron_terapipe.search.answer.figures import flops_utilization
from megatron_terapipe.search.answer.json_schema import UtilizationPart
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.price.cost_model import CostModel
from megatron_terapipe.search.price.efficiency import ProfileFactors, moved
from megatron_terapipe.search.price.roofline import Roofline
from megatron_terapipe.search.rank.ranked import Ranked
from megatron_terapipe.search.rank.sensitivity import moves_of, with_constants


class PublishedUtilization(NamedTuple):
    """The best published MFU of a generation."""

    share: float
    """Of the peak, in [0, 1]."""
    causal_share: float
    """The same without the scores that causal attention never computes."""
    run: str
    """Which run it was, in words."""


NEMOTRON = PublishedUtilization(0.554, 0.526, "Nemotron-4 15B on 16 H100, NVIDIA dgxc-benchmarking")
ZERO_INFINITY = PublishedUtilization(0.40, 0.40, "512 V100, arXiv 2104.07857")
PUBLISHED: Mapping[str, tuple[PublishedUtilization, PublishedUtilization]] = MappingProxyType(
    {
        "ampere": (
            PublishedUtilization(0.642, 0.618, "MPT-7B on 8 A100 with FSDP, llm-foundry"),
            PublishedUtilization(0.563, 0.559, "a GPT of 1T parameters on 512 A100, arXiv 2205.05198"),
        ),
        "hopper": (NEMOTRON, NEMOTRON),
        "volta": (ZERO_INFINITY, ZERO_INFINITY),
    }
)
"""On one node and on several, by generation of devices, as in the text above."""


def best_published(cluster: Cluster) -> PublishedUtilization | None:
    """Return the best published MFU for the devices of a cluster; None for several kinds, or where none is known."""
    generations = {node.device.generation for node in cluster.nodes}
    found = PUBLISHED.get(generations.pop()) if len(generations) == 1 else None
    return None if found is None else found[len(cluster.nodes) > 1]


TOLERANCE = 0.03
"""Share of the peak by which a prediction may be above the best published one before somebody must say why."""

MOST = log(3.0)  # change of the logarithm of a constant beyond which it explains nothing
STEPS = 6  # simulations that look for the value of the constant


def check_utilization(entry: Ranked, model: CostModel) -> UtilizationPart | None:
    """Return the doubt where a strategy is predicted to beat all published runs; None where it is not."""
    time_s, published = entry.iteration_time_s, best_published(model.cluster)
    used, causal = (
        flops_utilization(entry.strategy, model.workload, model.cluster, time_s, model.precision, causal=each)
        for each in (False, True)
    )
    if published is None or used <= published.share + TOLERANCE:
        return None
    name = value = needed = None
    # Else it is the convention, which counts scores that are not computed: the causal share is one that was published.
    if causal > published.causal_share + TOLERANCE:
        name, value, needed = _doubted(entry, time_s, log(causal / published.causal_share), model)
    return UtilizationPart(
        predicted=used,
        predicted_causal=causal,
        published=published.share,
        published_causal=published.causal_share,
        published_run=published.run,
        constant=name,
        value=value,
        needed=needed,
    )


def _doubted(entry: Ranked, time_s: float, target: float, model: CostModel) -> tuple[str, float, float | None]:
    """Return the constant that moves the time most, its value, and the value with which a strategy takes longer.

    Args:
        target: logarithm of how much longer it is to take; None is returned where no value does that.
    """
    constants = model.efficiency if isinstance(model.op_times, Roofline) else ProfileFactors()

    def log_time(name: str, logarithm: float) -> float:
        then = with_constants(model, moved(constants, [name], logarithm))
        return log(then.predict_time(entry.strategy).iteration_time_s / time_s)

    slopes = {
        name: log_time(name, log1p(change)) / log1p(change)
        for name, change, _ in moves_of(constants)
        if isinstance(getattr(constants, name), float)
    }
    constant = max(slopes, key=lambda name: abs(slopes[name]))
    at, slope, needed = 0.0, slopes[constant], None
    for _ in range(STEPS):
        at = max(-MOST, min(MOST, at + (target - (log_time(constant, at) if at else 0.0)) / slope))
    value = float(getattr(constants, constant))
    if abs(log_time(constant, at) - target) < 0.01:
        needed = value * exp(at)
    return constant, value, needed
