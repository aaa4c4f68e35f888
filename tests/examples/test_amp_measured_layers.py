"""Measured forwards taken apart into launches and device time."""

from dataclasses import replace

import numpy as np
import pytest

from examples.amp.measured_layers import MeasuredDevice, MeasuredLayers
from megatron_terapipe.devices import Device
from megatron_terapipe.errors import DataError
from megatron_terapipe.search.machine.cluster import Link
from megatron_terapipe.search.machine.trainers import MEGATRON_LM
from megatron_terapipe.search.price.efficiency import HardwareEfficiency
from megatron_terapipe.search.price.layer_times import LayerQuery
from megatron_terapipe.search.price.roofline import Roofline
from megatron_terapipe.search.price.workload import Attention, Layer, Product, Workload

FAST = Device(name="fast", memory_bytes=16e9, memory_bandwidth=900e9, half_flops=125e12, single_flops=15e12)
SLOW = Device(name="slow", memory_bytes=16e9, memory_bandwidth=200e9, half_flops=20e12, single_flops=8e12)
LINK = Link(bandwidth=6e9, latency_s=1e-6)
TOKENS = 512


def block(name, parallel=("column", "row")):
    """A transformer layer of the width 512."""
    return Layer(
        name=name,
        kind="block",
        tokens=TOKENS,
        hidden_size=512,
        parameters=12 * 512**2,
        products=(Product(512, 2048, parallel[0]), Product(2048, 512, parallel[1])),
        attention=Attention(8, 8, 64),
        num_norms=2,
        activation_width=2048,
    )


def head(name):
    product = Product(512, 30000, "column")
    return Layer(name=name, kind="head", tokens=TOKENS, hidden_size=512, parameters=512 * 30000, products=(product,))


def measured(layers, **forward_s):
    """Op times of the layers from forwards by device: a function of layer name and tensor-parallel size."""
    workload = Workload(name="w", layers=layers, seq_length=TOKENS, first_dealt=0, end_dealt=len(layers))
    devices = {
        name: MeasuredDevice(
            device=FAST if name == "fast" else SLOW,
            roofline=Roofline(replace(HardwareEfficiency(), gemm_area=0.0, gemm_depth=0.0), MEGATRON_LM, "fp16"),
            inside=LINK,
            forward_s={layer.name: {size: times(layer.name, size) for size in (1, 2)} for layer in layers},
        )
        for name, times in forward_s.items()
    }
    return MeasuredLayers(workload=workload, devices=devices)


def forward(op_times, layer, device, micro_batch_size=1.0, tensor_parallel_size=1.0):
    sizes = {"tensor_parallel_size": tensor_parallel_size, "micro_batch_size": micro_batch_size}
    times = op_times(LayerQuery(layer, device, **sizes, start=0.0, end=float(TOKENS)))
    return times.forward, times.input_gradient + times.weight_gradient


@pytest.mark.parametrize("size", [1, 2])
def test_measured_times_are_predicted(size):
    layers = (block("a"), block("b"))
    op_times = measured(layers, fast=lambda name, tp: 4e-3 + tp * 1e-4, slow=lambda name, tp: 7e-3 + tp * 1e-4)
    for layer in layers:
        assert forward(op_times, layer, FAST, 1.0, float(size))[0] == pytest.approx(4e-3 + size * 1e-4)
        assert forward(op_times, layer, SLOW, 1.0, float(size))[0] == pytest.approx(7e-3 + size * 1e-4)


def test_a_launch_bound_forward_takes_more_sequences_for_free():
    layer = block("a")
    op_times = measured((layer,), fast=lambda name, tp: 20e-3)
    assert forward(op_times, layer, FAST, 2.0)[0] < 1.01 * 20e-3
    assert forward(op_times, layer, FAST, 1.0)[1] < 1.01 * 20e-3


def test_a_device_bound_forward_grows_in_proportion():
    # The other device shows that launching takes 1 ms at most.
    layer = block("a")
    op_times = measured((layer,), fast=lambda name, tp: 1e-3, slow=lambda name, tp: 20e-3)
    once, many = forward(op_times, layer, SLOW, 1.0)[0], forward(op_times, layer, SLOW, 8.0)[0]
    assert many == pytest.approx(8 * once, rel=0.01)
    assert 1.3 * once < forward(op_times, layer, SLOW, 1.0)[1] < 2.1 * once


def test_the_loss_comes_on_top_of_the_head():
    # The profile ends with the logits.
    layer = head("head")
    op_times = measured((layer,), fast=lambda name, tp: 1e-3 / tp)
    without_loss = measured((replace(layer, kind="other"),), fast=lambda name, tp: 1e-3 / tp)
    assert forward(op_times, layer, FAST)[0] > forward(without_loss, replace(layer, kind="other"), FAST)[0]


def test_grids_are_priced_as_numbers_are():
    layer = block("a")
    op_times = measured((layer,), fast=lambda name, tp: 2e-3 * tp, slow=lambda name, tp: 9e-3)
    sizes, tensors = np.array([1.0, 2.0, 8.0]), np.array([[1.0], [2.0]])
    query = LayerQuery(layer, SLOW, tensor_parallel_size=tensors, micro_batch_size=sizes, start=0.0, end=float(TOKENS))
    times = op_times(query)
    for row, tensor in enumerate((1.0, 2.0)):
        for column, size in enumerate(sizes):
            assert times.forward[row, column] == pytest.approx(forward(op_times, layer, SLOW, size, tensor)[0])


def test_unmeasured_devices_layers_and_sizes_are_refused():
    layer = block("a")
    op_times = measured((layer,), fast=lambda name, tp: 2e-3)
    with pytest.raises(DataError, match="no profile of slow: the profiles are of fast"):
        forward(op_times, layer, SLOW)
    with pytest.raises(DataError, match="'a' was not measured with tensor-parallel size 8: choose among 1, 2"):
        forward(op_times, layer, FAST, 1.0, 8.0)
    other = Workload(name="w", layers=(block("b"),), seq_length=TOKENS, first_dealt=0, end_dealt=1)
    with pytest.raises(DataError, match="layer 'b' has no time"):
        MeasuredLayers(workload=other, devices=op_times.devices)


def test_undivided_layers_are_scaled_by_their_own_measurement():
    # The other block shows that launching takes 1 ms; with two ranks this one takes 30 ms instead of 20 ms.
    large, small = block("a", ("none", "none")), block("b", ("none", "none"))
    op_times = measured((large, small), slow=lambda name, tp: (10e-3 + tp * 10e-3) if name == "a" else 1e-3)
    for size in (1, 2):
        assert forward(op_times, large, SLOW, 8.0, float(size))[0] == pytest.approx(
            8 * (10 + size * 10) * 1e-3, rel=0.01
        )
