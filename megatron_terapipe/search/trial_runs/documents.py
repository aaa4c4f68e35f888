"""The objects of a trial's line: model and cluster as files hold them, and strategies that leave nothing open."""

from dataclasses import asdict, fields, replace
from typing import Any

from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.search.cluster import Cluster, Device, Link, Node
from megatron_terapipe.search.workload import Workload
from megatron_terapipe.strategy import Strategy


def model_document(model: ModelConfig) -> dict[str, Any]:
    """The fields of a model that are not as they would be anyway."""
    document = {}
    for each in fields(ModelConfig):
        value = getattr(model, each.name)
        if value is not None and each.name != "model_preset" and value != each.default:
            document[each.name] = value
    return document


def cluster_document(cluster: Cluster) -> dict[str, Any]:
    """A cluster as a cluster file has it, every node by itself."""
    return {"name": cluster.name or "cluster", "nodes": [_node(node) for node in cluster.nodes]}


def _node(node: Node) -> dict[str, Any]:
    return {
        "hosts": [node.name],
        "device": _device(node.device),
        "devices": node.num_devices,
        "inside": _link(node.inside),
        "network": {**_link(node.network), "cards": node.num_network_cards},
    }


def _link(link: Link) -> dict[str, Any]:
    # As text with plain units every number comes back to the last bit.
    return {"bandwidth": f"{link.bandwidth!r} B/s", "latency": f"{link.latency_s!r} s"}


def _device(device: Device) -> dict[str, Any]:
    return {
        "name": device.name,
        "memory": f"{device.memory_bytes!r} B",
        "memory_bandwidth": f"{device.memory_bandwidth!r} B/s",
        "half_flops": f"{device.half_flops!r} FLOP/s",
        "single_flops": f"{device.single_flops!r} FLOP/s",
        "is_gpu": device.is_gpu,
    }


def explicit(strategy: Strategy, workload: Workload) -> Strategy:
    """A strategy with its token slices and stages written out, so that two that run the same are equal."""
    num_stages = strategy.pipeline_parallel_size * strategy.num_model_chunks
    return replace(
        strategy,
        token_slices=strategy.cut(workload.seq_length).lengths,
        stage_partition=tuple(workload.partition(strategy.stage_partition, num_stages).bounds),
        global_batch_size=strategy.num_micro_batches * strategy.micro_batch_size * strategy.data_parallel_size,
    )


def same_run(strategy: Strategy) -> tuple[tuple[str, Any], ...]:
    """What tells two explicit strategies apart; comparable."""
    return tuple(sorted((name, str(value)) for name, value in asdict(strategy).items() if name != "placement"))
