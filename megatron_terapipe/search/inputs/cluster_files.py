"""Clusters from files: JSON or YAML in our own form, the `cluster` object of published trials, or a hostfile.

What a file leaves out, the library fills in by the machine or the device; notes say so.
"""

from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field

from deepspeed_ext.plan.text.text_files import read_text
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.inputs.cluster import Cluster, Link, Node, check_num_devices
from megatron_terapipe.search.inputs.documents import parse_text
from megatron_terapipe.search.inputs.doubts import inside_doubt
from megatron_terapipe.search.inputs.entries import Entry, Text, fault, place, read_entry
from megatron_terapipe.search.inputs.hostfile import hostfile_notes, is_hostfile, parse_hostfile
from megatron_terapipe.search.inputs.library import GIGABIT, GIGABYTE
from megatron_terapipe.search.inputs.node_entries import (
    ClusterEntry,
    DeviceCount,
    DeviceOrName,
    NodeCount,
    NodeGroup,
    assumed,
    read_groups,
)

__all__ = ["parse_cluster", "read_cluster", "read_cluster_with_notes"]

NamedBandwidth = Annotated[float, Field(ge=1e-9, le=1e9)]
"""Bandwidth in the unit that the name of its field says."""


class FlatCluster(Entry):
    """The `cluster` object of published trials: devices of one kind on equal nodes, in a few flat fields.

    `intra_node_GBps` is from a device to another, in one direction; `inter_node_Gbps` of all network cards of a node.
    """

    device: DeviceOrName
    devices_per_node: DeviceCount | None = None
    num_nodes: NodeCount | None = None
    num_devices: NodeCount | None = None
    intra_node_GBps: NamedBandwidth | None = None  # noqa: N815
    inter_node_Gbps: NamedBandwidth | None = None  # noqa: N815
    network_cards: DeviceCount | None = None
    name: Text | None = None


class TrialCluster(FlatCluster):
    """The cluster in a line of trials, which may have more fields than are read."""

    model_config = ConfigDict(extra="ignore")


def is_flat(document: object) -> bool:
    """Whether an object describes a cluster by flat fields."""
    return isinstance(document, Mapping) and "nodes" not in document and "device" in document


def read_flat(flat: FlatCluster, file: str, path: str = "") -> tuple[Cluster, tuple[str, ...]]:
    """Return the cluster that flat fields describe, and a line for each link that the library had to say.

    A node has as many network cards as the line rate of those of the device's usual machine needs to make its sum.

    Raises:
        ConfigError: if fields contradict each other, or the device is not known.
    """
    device, machine = flat.device.read(place(file, path, "device"))
    per_node = flat.devices_per_node or machine.num_devices
    if flat.num_devices is None and flat.num_nodes is None:
        raise ConfigError(f"{place(file, path, 'num_devices')} is missing: give a whole number")
    most = None if flat.num_nodes is None else flat.num_nodes * per_node
    num_devices = flat.num_devices or most or 0
    if most is not None and num_devices > most:
        where = place(file, path, "num_devices")
        raise fault(where, num_devices, "is more than num_nodes x devices_per_node", "change one of them")
    inside, network, cards = machine.inside, machine.network, machine.num_network_cards
    missing = []
    if flat.intra_node_GBps is not None:
        inside = Link(bandwidth=flat.intra_node_GBps * GIGABYTE, latency_s=inside.latency_s)
    elif min(per_node, num_devices) > 1:
        missing.append("links inside")
    if flat.inter_node_Gbps is not None:
        total = flat.inter_node_Gbps * GIGABIT
        cards = flat.network_cards or max(1, ceil(total / network.bandwidth - 1e-9))
        network = Link(bandwidth=total / cards, latency_s=network.latency_s)
    elif num_devices > per_node:
        missing.append("network")
    group = NodeGroup(
        device=device,
        num_devices=per_node,
        inside=inside,
        network=network,
        num_network_cards=cards,
        host=machine.host,
        notes=(assumed(missing, device, machine),) if missing else (),
    )
    if flat.intra_node_GBps is not None:
        group = group.doubted(inside_doubt(device, inside))
    sizes = [min(per_node, num_devices - first) for first in range(0, num_devices, per_node)]
    nodes = tuple(group.node(f"node-{index}", num_devices=size) for index, size in enumerate(sizes, start=1))
    return Cluster(nodes=nodes, name=flat.name or f"{num_devices} x {device.name}"), group.notes


def read_cluster(path: str, *, device: str | None = None) -> Cluster:
    """Read a cluster; see `read_cluster_with_notes`.

    Args:
        device: device of every host of a hostfile; None for other files.
    """
    return read_cluster_with_notes(path, device=device)[0]


def read_cluster_with_notes(path: str, *, device: str | None = None) -> tuple[Cluster, tuple[str, ...]]:
    """Read a cluster, and what was assumed of it.

    Args:
        path: JSON, YAML (by the ending `.yaml` or `.yml`) or a hostfile.
        device: device, or machine, of the library that the hosts of a hostfile have.

    Returns:
        The cluster, and a line for each assumption.

    Raises:
        ConfigError: if the file cannot be read, or a field is wrong; it names file, field, value and remedy.
    """
    if not Path(path).exists():
        raise ConfigError(
            f"{path} is no file: give a hostfile, of lines HOST slots=N, with --device; or a file of nodes, such as "
            "examples/clusters/a100-64.json"
        )
    text = read_text(path)
    if not text.strip():
        raise ConfigError(
            f"{path} is empty: write nodes as docs/reference/search-inputs.md shows, or hostfile lines, HOST slots=N"
        )
    if is_hostfile(text, path):
        return _of_hostfile(text, path, device)
    if device is not None:
        raise ConfigError(f"--device {device} is for hostfiles, and {path} names its devices: drop the flag")
    return parse_cluster(parse_text(text, path), path)


def parse_cluster(document: object, where: str) -> tuple[Cluster, tuple[str, ...]]:
    """Read a cluster from the object of a file.

    Args:
        document: in our form (`nodes`) or in that of trials (`num_devices` or `num_nodes`, `device`, ...).

    Raises:
        ConfigError: if a field is wrong.
    """
    if is_flat(document):
        return read_flat(read_entry(FlatCluster, document, where), where)
    cluster = read_entry(ClusterEntry, document, where)
    return _cluster(read_groups(cluster, where), cluster.name or where.rpartition("/")[2].rpartition(".")[0])


def _of_hostfile(text: str, path: str, device: str | None) -> tuple[Cluster, tuple[str, ...]]:
    if device is None:
        raise ConfigError(f"{path} is a hostfile, which names no device: add --device NAME, such as --device A100-80GB")
    hosts = parse_hostfile(text, path)
    group = NodeGroup.of_library(device, "--device")
    nodes = tuple(group.node(host.name, num_devices=host.slots) for host in hosts if host.slots)
    return Cluster(nodes=nodes, name=path.rpartition("/")[2]), (*hostfile_notes(hosts), *group.notes)


def _cluster(groups: list[NodeGroup], name: str) -> tuple[Cluster, tuple[str, ...]]:
    # Before any node is made.
    check_num_devices(sum(len(group.hosts) * group.num_devices for group in groups), name)
    nodes: list[Node] = []
    for group in groups:
        nodes += [group.node(host) for host in group.hosts]
    seen: set[str] = set()
    for node in nodes:
        if node.name in seen:
            raise ConfigError(f"cluster {name}: host {node.name} stands twice: give each node a name of its own")
        seen.add(node.name)
    notes = [note for each in groups for note in each.notes]
    return Cluster(nodes=tuple(nodes), name=name), tuple(dict.fromkeys(notes))
