import re
from pathlib import Path
from typing import Any

import pytest

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.machine import library
from megatron_terapipe.search.machine.cluster import Cluster, cluster_document
from megatron_terapipe.search.machine.cluster_files import parse_cluster, read_cluster, read_cluster_with_notes
from megatron_terapipe.search.machine.library import MACHINES
from tests.architecture.sources import ROOT


def parsed(**fields: Any) -> tuple[Cluster, tuple[str, ...]]:
    return parse_cluster(fields, "c.json")


def test_nodes_of_two_kinds() -> None:
    cluster, notes = parsed(
        name="two kinds",
        nodes=[
            {
                "count": 2,
                "name": "fast",
                "device": "A100-80GB",
                "devices": 4,
                "inside": {"bandwidth": "300 GB/s", "latency": "3 us"},
                "network": {"bandwidth": "200 Gbit/s", "cards": 4, "latency_us": 9},
            },
            {"device": "V100", "devices": 8, "inside": "150 GB/s", "network": "25 Gbit/s"},
        ],
    )
    assert [node.name for node in cluster.nodes] == ["fast-1", "fast-2", "node-3"]
    assert cluster.num_devices == 16
    assert cluster.node_of_device == (0,) * 4 + (1,) * 4 + (2,) * 8
    assert not cluster.is_uniform
    first, last = cluster.nodes[0], cluster.nodes[-1]
    assert (first.inside.bandwidth, first.inside.latency_s) == (300e9, pytest.approx(3e-6))
    assert (first.network.bandwidth, first.num_network_cards) == (25e9, 4)
    assert first.network.latency_s == pytest.approx(9e-6)
    assert (last.device, last.num_network_cards) == (library.device("V100"), 1)
    assert last.network.bandwidth == 25e9 / 8
    assert not notes


def test_omitted_fields_come_from_the_library_with_a_note() -> None:
    cluster, notes = parsed(nodes=[{"device": "A100-80GB", "count": 2, "network": "100 Gbit/s"}])
    assert cluster.num_devices == 16
    assert cluster.nodes[0].inside == library.machine("dgx-a100").inside
    assert notes == (
        "number of devices and links inside of A100-SXM4-80GB nodes not given: those of a dgx-a100 are taken",
    )
    assert not parsed(nodes=[{"machine": "p3.16xlarge"}])[1]


def test_memory_of_hosts() -> None:
    cluster, notes = parsed(nodes=[{"machine": "dgx-h100"}, {"machine": "dgx-h100", "host": {"memory": "1900 GB"}}])
    usual, less = (node.host for node in cluster.nodes)
    assert (usual.memory_bytes, usual.bandwidth) == (2e12, 64e9)
    assert (less.memory_bytes, less.bandwidth) == (1.9e12, 64e9)
    assert not cluster.is_uniform and not notes
    described, _ = parse_cluster(cluster_document(cluster.nodes), "c.json")
    assert [node.host for node in described.nodes] == [usual, less]


def test_one_device_for_the_whole_file() -> None:
    cluster, _ = parsed(device="T4", nodes=[{"devices": 2}, {"devices": 4}, {"device": "L4", "devices": 1}])
    assert [(node.device.name, node.num_devices) for node in cluster.nodes] == [("T4", 2), ("T4", 4), ("L4", 1)]


def test_a_device_by_its_fields() -> None:
    own = {
        "name": "mine",
        "memory": "48 GiB",
        "memory_bandwidth_GBps": 1200,
        "half_flops": "200 TFLOP/s",
        "single_flops_TFLOPs": 25,
    }
    device = parsed(nodes=[{"device": own}])[0].nodes[0].device
    assert (device.memory_bytes, device.memory_bandwidth) == (48 * 2**30, 1.2e12)
    assert (device.half_flops, device.single_flops, device.is_gpu) == (200e12, 25e12, True)
    like = parsed(nodes=[{"device": {"like": "A100-80GB", "memory_GB": 40}}])[0].nodes[0]
    assert like.device.half_flops == 312e12
    assert like.device.memory_bytes == 40e9
    assert like.inside == library.machine("dgx-a100").inside


def test_hosts_and_overrides() -> None:
    cluster, _ = parsed(
        nodes=[{"hosts": ["a", "b", "c"], "machine": "dgx-a100"}],
        overrides={"b": {"network": {"cards": 2}, "devices": 6}},
    )
    assert [node.name for node in cluster.nodes] == ["a", "b", "c"]
    assert [node.num_network_cards for node in cluster.nodes] == [8, 2, 8]
    assert [node.num_devices for node in cluster.nodes] == [8, 6, 8]
    assert cluster.nodes[1].network == cluster.nodes[0].network


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "c.json: nodes is missing: give a list"),
        ({"nodes": [{}]}, "c.json: nodes[0].device is missing"),
        (
            {"nodes": [{"device": "A100-SXN4"}]},
            "c.json: nodes[0].device 'A100-SXN4' is not in the device library: did you",
        ),
        ({"nodes": [{"machine": "pcie-4"}]}, 'c.json: nodes[0].machine "pcie-4" is a machine for any device'),
        ({"nodes": [{"device": "T4", "count": 10**9}]}, "c.json: nodes[0].count 1000000000 is more than 100,000"),
        ({"nodes": [{"device": {"memory": "1 GB"}}]}, "c.json: nodes[0].device.memory_bandwidth is missing"),
        ({"nodes": [{"device": "T4", "hosts": ["a", "a"]}]}, "host a appears twice"),
        ({"nodes": [{"device": "T4", "hosts": ["a"], "count": 2}]}, "contradicts hosts, which names 1"),
        (
            {"nodes": [{"device": "T4", "name": "t"}], "overrides": {"u": {}}},
            "c.json: overrides.u is not a host: choose among t",
        ),
    ],
)
def test_errors(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        parse_cluster(fields, "c.json")
    assert "\n" not in str(caught.value)


def test_hostfile(tmp_path: Path) -> None:
    path = tmp_path / "hostfile"
    path.write_text("# ours\nworker-1 slots=8\n\nworker-2 slots=4  # half\nworker-3 slots=0\n")
    cluster, notes = read_cluster_with_notes(str(path), device="V100-16GB")
    assert [(node.name, node.num_devices) for node in cluster.nodes] == [("worker-1", 8), ("worker-2", 4)]
    assert notes == (
        "hosts without slots are not used: worker-3",
        "links inside and network of V100-SXM2-16GB nodes not given: those of a p3.16xlarge are taken",
    )
    machine = read_cluster(str(path), device="p4d.24xlarge").nodes[0]
    assert (machine.device.name, machine.num_network_cards) == ("A100-SXM4-40GB", 4)


@pytest.mark.parametrize(
    ("name", "text", "device", "message"),
    [
        ("hostfile", "a slots=2\n", None, "is a hostfile, which names no device: add --device NAME"),
        ("c.json", '{"nodes": [{"device": "T4"}]}', "T4", "names its devices: drop the flag"),
        ("hostfile", "\n", "A100", "is empty: write nodes"),
    ],
)
def test_refused_files(name: str, text: str, device: str | None, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_cluster(str(tmp_path / name), device=device)


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "clusters").glob("*.*")), ids=lambda path: path.name)
def test_examples_without_notes_about_units(path: Path) -> None:
    cluster, notes = read_cluster_with_notes(str(path))
    assert not [each for each in notes if "check" in each or "so write" in each]
    devices = {node.device.name for node in cluster.nodes}
    assert cluster.num_devices == 1024 and len(devices) == 4 if path.name == "mixed-1024.yaml" else cluster.num_devices


def test_a_named_machine_keeps_its_number_of_cards() -> None:
    document = {"nodes": [{"machine": "dgx-h100", "count": 2, "network": "200 Gbit/s"}]}
    cluster, notes = parse_cluster(document, "file")
    assert [(node.network.bandwidth, node.num_network_cards) for node in cluster.nodes] == [(25e9, 8)] * 2
    assert any("each of the 8 cards" in note for note in notes)
    one = parse_cluster({"nodes": [{"device": "H100", "network": "200 Gbit/s"}]}, "file")[0]
    assert one.nodes[0].num_network_cards == 1


@pytest.mark.parametrize(
    ("node", "note"),
    [
        ({"device": "H100", "inside": "900 GB/s"}, "so write 450 GB/s"),
        ({"device": "A100", "inside": {"bandwidth_GBps": 600}}, "is the sum of both directions, as links are sold"),
        ({"machine": "dgx-b200", "inside": "1800 GB/s"}, "so write 900 GB/s"),
        ({"device": "V100-16GB", "inside": "900 GB/s"}, "is 6 times the 150 GB/s of a p3.16xlarge"),
        ({"machine": "dgx-h100", "network": "400 GB/s"}, "network 3200 Gbit/s (400 GB/s) is more than one card has"),
        ({"machine": "dgx-h100", "network": "3200 Gbit/s"}, "their number in cards"),
        ({"machine": "dgx-a100", "network": "12.5 Gbit/s"}, "and 12.5 GB/s is the rate of a card of 100 Gbit/s"),
        ({"device": {"like": "H100", "half_flops": "1979 TFLOP/s"}}, "counts sparsity: write 989"),
        # A host that differs.
        (
            {"nodes": [{"name": "a", "machine": "dgx-h100"}], "overrides": {"a": {"inside": "900 GB/s"}}},
            "so write 450 GB/s",
        ),
    ],
)
def test_notes_about_units(node: dict[str, Any], note: str) -> None:
    _, notes = parse_cluster(node if "nodes" in node else {"nodes": [node]}, "c.json")
    assert sum(note in each for each in notes) == 1, notes


@pytest.mark.parametrize(
    "node",
    [
        {"device": "H100", "inside": "450 GB/s", "network": "400 Gbit/s"},
        {"device": "A100", "inside": "300 GB/s", "network": "25 GB/s"},
        {"device": "T4", "inside": "12 GB/s", "network": "5 Gbit/s"},
        {"machine": "p5.48xlarge", "network": {"bandwidth": "100 GB/s", "cards": 4}},
        {"device": {"like": "H100", "half_flops": "900 TFLOP/s"}},
        {"device": {"name": "own", "memory": "9 GB", "memory_bandwidth": "1 TB/s", "half_flops": "1 PFLOP/s",
                    "single_flops": "1 TFLOP/s"}, "inside": "9000 GB/s"},
    ],
)  # fmt: skip
def test_no_notes_about_units(node: dict[str, Any]) -> None:
    _, notes = parse_cluster({"nodes": [node]}, "c.json")
    assert not [note for note in notes if "not given" not in note]


def test_no_notes_about_units_of_machines() -> None:
    for name in MACHINES:
        device = {"device": "A10"} if name in library.FOR_ANY_DEVICE else {}
        notes = parse_cluster({"nodes": [{"machine": name, **device}]}, "c")[1]
        assert not [each for each in notes if "guess" not in each]
