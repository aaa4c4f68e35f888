"""Small models and clusters, and strategies drawn from a space, for tests of the search."""

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.devices import Device
from megatron_terapipe.search.answer.question import Question
from megatron_terapipe.search.learn.calibration import no_calibration
from megatron_terapipe.search.learn.costs import Costs
from megatron_terapipe.search.machine.cluster import Cluster, Link, Node
from megatron_terapipe.search.price.workload import gpt_workload
from megatron_terapipe.search.rank.rules import SearchCounts, legal_grids
from megatron_terapipe.search.rank.space import Choices, SearchProblem, all_choices
from megatron_terapipe.strategy import SOLVED, Strategy

FAST = Device(name="fast", memory_bytes=40e9, memory_bandwidth=1.5e12, half_flops=300e12, single_flops=20e12)
SLOW = Device(name="slow", memory_bytes=16e9, memory_bandwidth=0.9e12, half_flops=120e12, single_flops=15e12)


def small_model(num_layers: int = 6, seq_length: int = 512, hidden_size: int = 1024, **features: Any) -> ModelConfig:
    return ModelConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_attention_heads=8,
        seq_length=seq_length,
        vocab_size=32000,
        **features,
    )


def node(name: str, device: Device = FAST, num_devices: int = 2, network: float = 12e9) -> Node:
    return Node(
        name=name,
        device=device,
        num_devices=num_devices,
        inside=Link(bandwidth=200e9, latency_s=3e-6),
        network=Link(bandwidth=network, latency_s=8e-6),
    )


def small_cluster(num_nodes: int = 2, device: Device = FAST, num_devices: int = 2) -> Cluster:
    return Cluster(nodes=tuple(node(f"host{index}", device, num_devices) for index in range(num_nodes)))


def mixed_cluster() -> Cluster:
    return Cluster(nodes=(node("a", FAST), node("b", SLOW, network=3e9), node("c", FAST), node("d", SLOW, network=3e9)))


def small_problem(cluster: Cluster | None = None, global_batch_size: int = 8, **model: Any) -> SearchProblem:
    return SearchProblem(
        workload=gpt_workload(small_model(**model)),
        cluster=cluster or small_cluster(),
        global_batch_size=global_batch_size,
    )


def question(problem: SearchProblem, constraints: Mapping[str, tuple[Any, ...]] | None = None) -> Question:
    """The question that a search is asked, with prices of data sheets."""
    costs = Costs(
        workload=problem.workload,
        precision=problem.precision,
        software=problem.software,
        calibration=no_calibration(),
        profile=None,
        notes=(),
    )
    return Question(problem=problem, constraints=constraints or {}, costs=costs)


def legal_strategies(problem: SearchProblem, choices: Choices) -> Iterator[Strategy]:
    """All strategies of a space that keep the rules."""
    for legal in legal_grids(problem, choices, SearchCounts()):
        for flat in np.flatnonzero(legal.legal).tolist():
            place = np.unravel_index(flat, legal.grid.shape)
            yield legal.grid.strategy([int(each) for each in place], problem)


def drawn(problem: SearchProblem, number: int, seed: int, choices: Choices | None = None) -> Iterator[Strategy]:
    """Legal strategies of a space, without those whose stages are yet to be solved."""
    rng = random.Random(seed)
    grids = list(legal_grids(problem, choices or all_choices(problem), SearchCounts()))
    for _ in range(number):
        legal = rng.choice(grids)
        places = np.flatnonzero(legal.legal)
        place = np.unravel_index(rng.choice(places.tolist()), legal.grid.shape)
        if legal.grid.partition[int(place[1])] == SOLVED:
            place = (place[0], 0, *place[2:])
        yield legal.grid.strategy([int(each) for each in place], problem)
