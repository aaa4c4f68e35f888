"""The clusters of AMP's experiments: EC2 nodes with four devices each.

Devices and links are as in data sheets, with two differences that are facts of these nodes: a T4 is held to 70 W,
so that matrix products run at a clock that is far below the data sheet's; and its PCIe link inside a g4dn.12xlarge
passes 50 Gbit/s (AMP, section 5.1).
"""

from dataclasses import replace

from megatron_terapipe.devices import Device
from megatron_terapipe.search.machine.cluster import Cluster, Link, Node
from megatron_terapipe.search.machine.library import device, machine

GIGABIT = 1e9 / 8
T4_HALF_FLOPS = 24e12 / 0.75
"""cuBLAS runs at 24 TFLOP/s under the power limit (forums.developer.nvidia.com/t/about-gpu-peak-performance/264462);
written so that the usual share of a peak (`HardwareEfficiency.gemm_efficiency`) gives that. The devices have no
generation, because that share is of both kinds."""


def t4() -> Device:
    """A T4 under its power limit."""
    return replace(device("T4"), half_flops=T4_HALF_FLOPS, generation="")


def v100() -> Device:
    """A V100 with 16 GB."""
    return replace(device("V100-SXM2-16GB"), generation="")


def g4dn(index: int) -> Node:
    """A g4dn.12xlarge: four T4, PCIe, 50 Gbit/s."""
    known = machine("g4dn.12xlarge")
    inside = Link(bandwidth=50 * GIGABIT, latency_s=known.inside.latency_s)
    return Node(name=f"g4dn-{index}", device=t4(), num_devices=4, inside=inside, network=known.network)


def p3(index: int) -> Node:
    """A p3.8xlarge: four V100, NVLink, 10 Gbit/s."""
    known = machine("p3.8xlarge")
    return Node(name=f"p3-{index}", device=v100(), num_devices=4, inside=known.inside, network=known.network)


def homogeneous() -> Cluster:
    """Four g4dn.12xlarge."""
    return Cluster(nodes=tuple(map(g4dn, range(4))), name="homogeneous")


def het_cluster() -> Cluster:
    """Three p3.8xlarge, then one g4dn.12xlarge."""
    return Cluster(nodes=(*map(p3, range(3)), g4dn(3)), name="het_cluster")


def het_model() -> Cluster:
    """Four p3.8xlarge."""
    return Cluster(nodes=tuple(map(p3, range(4))), name="het_model")
