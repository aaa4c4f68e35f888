"""Models and clusters as the objects of files, every figure said, so that they are read as they were."""

from collections.abc import Sequence
from dataclasses import fields
from itertools import groupby
from typing import Any

from megatron_terapipe.config.model.model import ModelConfig
from megatron_terapipe.search.inputs.cluster import Device, HostMemory, Link, Node


def model_document(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of a model that are not as they would be anyway."""
    document = {}
    for each in fields(ModelConfig):
        value = getattr(model, each.name)
        if value is not None and each.name != "model_preset" and value != each.default:
            document[each.name] = value
    return document


def cluster_document(nodes: Sequence[Node], name: str = "") -> dict[str, Any]:
    """Return the object of a cluster file; equal nodes next to each other share an entry.

    Args:
        nodes: in the order of their ranks.
        name: of the cluster; empty = none.
    """
    groups = [(parts, [node.name for node in group]) for parts, group in groupby(nodes, key=_parts)]
    listed = [{"hosts": hosts, **_described(*parts)} for parts, hosts in groups]
    return {"name": name, "nodes": listed} if name else {"nodes": listed}


def _parts(node: Node) -> tuple[Device, int, Link, Link, int, HostMemory]:
    return node.device, node.num_devices, node.inside, node.network, node.num_network_cards, node.host


def _described(
    device: Device, num_devices: int, inside: Link, network: Link, cards: int, host: HostMemory
) -> dict[str, Any]:
    return {
        "device": _device(device),
        "devices": num_devices,
        "inside": _link(inside),
        "network": {**_link(network), "cards": cards},
        "host": {"memory": f"{host.memory_bytes!r} B", "bandwidth": f"{host.bandwidth!r} B/s"},
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
        **({"generation": device.generation} if device.generation else {}),
    }
