"""A model, clusters and strategies that the tests of costs price."""

from dataclasses import replace
from typing import Any

from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.devices import Device
from megatron_terapipe.search.machine.cluster import Cluster, Link, Node
from megatron_terapipe.search.price.workload import gpt_workload
from megatron_terapipe.strategy import Strategy

A100 = Device(name="A100", memory_bytes=80e9, memory_bandwidth=2.0e12, half_flops=312e12, single_flops=19.5e12)
NODE = Node(
    name="node",
    device=A100,
    num_devices=8,
    inside=Link(bandwidth=300e9, latency_s=3e-6),
    network=Link(bandwidth=25e9, latency_s=5e-6),
    num_network_cards=4,
)


def gpt(layers: int, hidden: int, heads: int, tokens: int, words: int, **more: Any) -> ModelConfig:
    """A model by its sizes."""
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "seq_length": tokens}
    return ModelConfig(**sizes, vocab_size=words, **more)


GPT = gpt_workload(gpt(24, 2048, 16, 2048, 51200))


def nodes(count: int, **changes: object) -> Cluster:
    """A cluster of equal nodes."""
    return Cluster(nodes=(replace(NODE, **changes),) * count)  # type: ignore[arg-type]


def strategy(**changes: object) -> Strategy:
    """A strategy for two nodes that uses every kind of parallelism."""
    values: dict[str, object] = {
        "data_parallel_size": 2,
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 4,
        "micro_batch_size": 2,
        "global_batch_size": 64,
        "recompute": "full",
    }
    return Strategy(**(values | changes))  # type: ignore[arg-type]
