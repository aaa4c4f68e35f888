"""What a profile says of links and of the engine, as constants of the cost model."""

import pytest

from megatron_terapipe.search.cost.collectives import GroupTopology, all_reduce_s, transfer_s
from megatron_terapipe.search.cost.step_costs import step_costs
from megatron_terapipe.search.inputs.cluster import Cluster, Link, Node
from megatron_terapipe.search.inputs.library import device
from megatron_terapipe.search.op_times.hardware_efficiency import HardwareEfficiency
from megatron_terapipe.search.op_times.profile_efficiency import measured_efficiency, message_line
from megatron_terapipe.search.software.terapipe import TERAPIPE
from tests.search.op_times.profiles import profile

LINK = Link(bandwidth=5e9, latency_s=2e-5)
CLUSTER = Cluster(
    nodes=(Node(name="here", device=device("cpu-core"), num_devices=2, inside=LINK, network=LINK, num_network_cards=1),)
)
SPAN = GroupTopology(2, 1, LINK.bandwidth, LINK.latency_s, LINK.bandwidth, LINK.latency_s)


def test_a_line_through_messages() -> None:
    line = message_line([(size, 3e-5 + size / 2e9) for size in (2**10, 2**16, 2**24)])
    assert line == pytest.approx((3e-5, 1 / 2e9), rel=1e-6)


def test_messages_are_then_priced_as_measured() -> None:
    efficiency = measured_efficiency(profile(), CLUSTER)
    for num_bytes in (2**10, 2**22):
        measured = 2e-4 + num_bytes / 1e9
        assert all_reduce_s(num_bytes, SPAN, efficiency) == pytest.approx(measured, rel=1e-6)
        assert transfer_s(num_bytes, LINK.bandwidth, LINK.latency_s, False, efficiency) == pytest.approx(
            measured, rel=1e-6
        )


def test_the_optimizer_is_then_priced_as_measured() -> None:
    efficiency = measured_efficiency(profile(), CLUSTER)
    bandwidth = CLUSTER.nodes[0].device.memory_bandwidth
    step = step_costs(
        1e6, 0, SPAN, SPAN, bandwidth, zero_stage=0, precision="fp32", software=TERAPIPE, efficiency=efficiency
    )
    assert step.optimizer == pytest.approx(1e6 * 1e-9, rel=1e-6)
    assert efficiency.iteration_s == 1e-3


def test_what_was_not_measured_stays() -> None:
    base = HardwareEfficiency(network_efficiency=0.123, gemm_efficiency=0.456)
    efficiency = measured_efficiency(profile(), CLUSTER, base)
    assert (efficiency.network_efficiency, efficiency.gemm_efficiency) == (0.123, 0.456)
