"""Figures that follow from a prediction, the best published ones, and days, device hours and price of a training."""

import argparse
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from megatron_terapipe.config.flops import BACKWARD_PER_FORWARD
from megatron_terapipe.devices import name_words
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.answer.json_documents import DecisionPart
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.machine.library import is_guess, names_one_device
from megatron_terapipe.search.price.price_document import Speed
from megatron_terapipe.search.price.workload import Workload
from megatron_terapipe.search.rank.search import Ranked
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


HOUR, DAY = 3600.0, 86_400.0
MILLION = 1e6  # tokens that device hours and price are of without `--tokens`

_SCALES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A whole training, as flags describe it."""

    tokens: float | None = None
    prices: Mapping[str, float] = field(default_factory=dict)
    """Price of a device hour by the name of the device; empty = not given."""

    def hourly_price(self, devices: Mapping[str, int]) -> float | None:
        """Return the price of an hour of some devices."""
        return sum(number * self.prices[name] for name, number in devices.items()) if self.prices else None

    def decision(self, problem: SearchProblem, entry: Ranked) -> DecisionPart | None:
        """Return the figures of a strategy; None if it cannot run, or no flag is given."""
        if self == NOT_ASKED or not entry.feasible or entry.prediction is None:
            return None
        devices = devices_of(problem.cluster, entry.strategy)
        tokens = self.tokens or MILLION
        steps = tokens / (entry.strategy.num_sequences * problem.workload.seq_length)
        hours, price = steps * entry.iteration_time_s / HOUR, self.hourly_price(devices)
        return DecisionPart(
            tokens=tokens,
            days=None if self.tokens is None else hours * HOUR / DAY,
            device_hours=hours * sum(devices.values()),
            cost=None if price is None else price * hours,
        )


NOT_ASKED = Training()  # without flags


def add_training_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a whole training."""
    group = parser.add_argument_group("training", "days, device hours and price of a whole training")
    group.add_argument("--tokens", metavar="N", help="tokens of the training, such as 300B, 2T or 15e12")
    group.add_argument("--price", metavar="P", help="of a device hour, such as 2.5; of each kind: A100=2.5,V100=1.2")


def training_of(options: argparse.Namespace, cluster: Cluster) -> Training:
    """Return the training that the flags describe."""
    tokens = None if options.tokens is None else _number(options.tokens, f"--tokens {options.tokens}")
    prices = {} if options.price is None else parse_prices(options.price, list(devices_of(cluster)))
    return Training(tokens=tokens, prices=prices)


def parse_prices(text: str, devices: Sequence[str]) -> dict[str, float]:
    """Return the price of an hour of each device, from 2.5 or A100=2.5,V100=1.2."""
    parts = text.split(",") if "=" in text or len(devices) > 1 else [f"{devices[0]}={text}"]
    given = [[word.strip() for word in part.partition("=")[::2]] for part in parts]
    found, unused, faults = {}, {name for name, _ in given}, []
    for device in devices:
        named = [pair for pair in given if names_one_device(pair[0], device)]
        # V100 is the one of 16 GB, and any other V100 without a price of its own.
        named = named or [pair for pair in given if name_words(pair[0]) <= name_words(device)]
        if len(named) == 1:
            found[device] = _number(named[0][1], f"--price {text}")
            unused.discard(named[0][0])
        else:
            faults.append(f"{'two prices' if named else 'no price'} of {device}")
    faults += [f"{name}, which the cluster has not" for name in sorted(unused)]
    if faults:
        raise ConfigError(f"--price {text} has {faults[0]}: give {','.join(f'{each}=PRICE' for each in devices)}")
    return found


def _number(text: str, given: str) -> float:
    match = re.fullmatch(r"([0-9]*\.?[0-9]+(?:E[+-]?[0-9]+)?)([KMBT]?)", text.strip().upper())
    number = float(match[1]) * _SCALES[match[2]] if match else 0.0
    if not 1e-9 <= number <= 1e18:
        raise ConfigError(f"{given} is not a number above 0 and up to 1e18: give one such as 2.5, 15e12 or 300B")
    return number
