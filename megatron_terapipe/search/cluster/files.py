"""Clusters from files: JSON or YAML in our own form, the `cluster` object of published trials, or a hostfile.

What a file leaves out, the library fills in by the machine or the device; notes say so.
"""

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.cluster.hostfile import is_hostfile, parse_hostfile
from megatron_terapipe.search.cluster.machine import Cluster, Node
from megatron_terapipe.search.cluster.nodes import NodeGroup, read_groups
from megatron_terapipe.search.cluster.trial_fields import is_trial_form, read_trial_form
from megatron_terapipe.search.reading import Fields, parse_text, read_text


def read_cluster(path: str, *, device: str | None = None) -> Cluster:
    """Read a cluster; see `read_cluster_with_notes`."""
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
    text = read_text(path)
    if not text.strip():
        raise ConfigError(f"{path} is empty: write nodes as docs/search.md shows, or lines of a hostfile, HOST slots=N")
    if is_hostfile(text):
        return _of_hostfile(text, path, device)
    if device is not None:
        raise ConfigError(f"--device {device} is for hostfiles, and {path} names its devices: drop the flag")
    return parse_cluster(parse_text(text, path), path)


def parse_cluster(document: object, where: str) -> tuple[Cluster, tuple[str, ...]]:
    """Read a cluster from the object of a file.

    Args:
        document: in our form (`nodes`) or in that of trials (`num_devices` or `num_nodes`, `device`, ...).
        where: what the object came from, for errors.

    Raises:
        ConfigError: if a field is wrong.
    """
    fields = Fields(document, where)
    if is_trial_form(fields):
        found = read_trial_form(fields)
        fields.finish()
        return found
    name = fields.text("name", where.rpartition("/")[2].rpartition(".")[0])
    groups = read_groups(fields)
    fields.finish()
    return _cluster(groups, name)


def _of_hostfile(text: str, path: str, device: str | None) -> tuple[Cluster, tuple[str, ...]]:
    if device is None:
        raise ConfigError(f"{path} is a hostfile, which names no device: add --device NAME, such as --device A100-80GB")
    hosts = parse_hostfile(text, path)
    group = NodeGroup.of_library(device, "--device")
    nodes = tuple(group.node(name, num_devices=slots) for name, slots in hosts)
    return Cluster(nodes=nodes, name=path.rpartition("/")[2]), group.notes


def _cluster(groups: list[NodeGroup], name: str) -> tuple[Cluster, tuple[str, ...]]:
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
