"""Figures that look like another unit are taken, and a note says so."""

from typing import Any

import pytest

from megatron_terapipe.search.machine.cluster_files import parse_cluster, read_cluster_with_notes
from megatron_terapipe.search.machine.library import MACHINES
from tests.architecture.sources import ROOT


@pytest.mark.parametrize(
    ("node", "note"),
    [
        ({"device": "H100", "inside": "900 GB/s"}, "so write 450 GB/s"),
        ({"device": "A100", "inside": {"bandwidth_GBps": 600}}, "is the sum of both directions, as links are sold"),
        ({"machine": "dgx-b200", "inside": "1800 GB/s"}, "so write 900 GB/s"),
        ({"device": "V100-16GB", "inside": "900 GB/s"}, "is 6 times that of a p3.16xlarge, which has 150 GB/s"),
        ({"machine": "dgx-h100", "network": "400 GB/s"}, "network 3200 Gbit/s (400 GB/s) is more than one card has"),
        ({"machine": "dgx-h100", "network": "3200 Gbit/s"}, "their number in cards"),
        ({"machine": "dgx-a100", "network": "12.5 Gbit/s"}, "and 12.5 GB/s is that of a card of 100 Gbit/s"),
        ({"device": {"like": "H100", "half_flops": "1979 TFLOP/s"}}, "counts sparsity: write 989"),
    ],
)
def test_doubts(node: dict[str, Any], note: str) -> None:
    _, notes = parse_cluster({"nodes": [node]}, "c.json")
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
def test_no_doubts(node: dict[str, Any]) -> None:
    _, notes = parse_cluster({"nodes": [node]}, "c.json")
    assert not [note for note in notes if "not given" not in note]


def test_hosts_that_differ_and_flat_clusters_are_doubted_too() -> None:
    nodes = {"nodes": [{"name": "a", "machine": "dgx-h100"}], "overrides": {"a": {"inside": "900 GB/s"}}}
    assert "so write 450 GB/s" in parse_cluster(nodes, "c.json")[1][0]
    flat = {"device": "A100", "num_nodes": 2, "intra_node_GBps": 600, "inter_node_Gbps": 1600}
    assert "so write 300 GB/s" in parse_cluster(flat, "c.json")[1][0]


def test_machines_and_examples_are_not_doubted() -> None:
    for name, machine in MACHINES.items():
        device = {} if machine.device else {"device": "A10"}
        assert not [
            each for each in parse_cluster({"nodes": [{"machine": name, **device}]}, "c")[1] if "guess" not in each
        ]
    for path in (ROOT / "examples" / "clusters").glob("*.*"):
        notes = read_cluster_with_notes(str(path))[1]
        assert not [each for each in notes if "check" in each or "so write" in each], path
