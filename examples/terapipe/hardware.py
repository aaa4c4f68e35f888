"""The hardware and software of TeraPipe's authors: 48 p3.16xlarge, and their code of early 2021 on PyTorch 1.7.

The code differs from today's trainer in facts, not in speeds: attention writes its scores out and computes those that
it masks; a message starts once its op is done and is waited for; only one tensor-parallel rank sends, whose
message is then handed on inside the node; each token slice makes gradients of its own, which are then added; they are
reduced in fp16 after the last backward.

Four figures are shares of the data sheets. None is the result of a fit, but which facts to take was decided
beside the published times of settings 1, 5, 8 and 9 (launches of a backward, no jitter, no fixed time, 6 bytes to
add a gradient), so this is not a blind test:

  * matrix products: a V100-SXM2-16GB computes 57, 78, 96 and 97 TFLOP/s in fp16 with square matrices of 1024, 2048,
    4096 and 8192 (github.com/zzc0721/torch-performance-test-data/issues/140). That is 0.78 of the peak for large ones,
    and half a wave of tiles lost in each product: 80 multiprocessors with a tile of 128 x 128 each.
  * messages: 4 GB go from one p3.16xlarge to another in 1.4 s (github.com/NVIDIA/nccl/issues/674), 0.91 of 25 Gbit/s.
  * launches: one layer takes 1.45 ms however few tokens it has (GPT3-1B on a V100, section 3.1 of the paper). The
    backward, which autograd launches from C++, is taken to need as long in all as the forward.
"""

from dataclasses import dataclass, replace

import numpy as np

from examples.terapipe.published import Setting
from megatron_terapipe.search.machine.cluster import Cluster, Node
from megatron_terapipe.search.machine.library import device, machine
from megatron_terapipe.search.machine.software import Operator
from megatron_terapipe.search.machine.trainers import MEGATRON_LM
from megatron_terapipe.search.price.cost_model import CostModel
from megatron_terapipe.search.price.efficiency import HardwareEfficiency
from megatron_terapipe.search.price.layer_times import LayerQuery, LayerTimes
from megatron_terapipe.search.price.roofline import Roofline
from megatron_terapipe.search.price.workload import Attention, Layer, Product, Workload
from megatron_terapipe.strategy import Strategy

LAYER_LAUNCH_S = 1.45e-3
"""Host time of one layer's forward, and of its backward."""

ADDING_BYTES = 6
"""Bytes that each token slice moves to add one weight's gradient to the sum, in fp16: both are read, the sum is
written. That the product writes the gradient is part of the product."""

PHYSICS = replace(
    HardwareEfficiency(),
    gemm_efficiency=97.4 / 125,
    gemm_area=80 * 128 * 128 / 2,
    transfer_network_efficiency=4e9 / 1.4 / (25e9 / 8),
    # The launches that were measured are all there is; nothing is computed but layers, no data loaded, nothing logged.
    launch_jitter=0.0,
    iteration_s=0.0,
)

V100 = replace(device("V100-SXM2-16GB"), generation="")
"""Without a generation: its shares are the figures above."""

CODE = replace(
    MEGATRON_LM,
    name="terapipe-2021",
    title="the authors' code",
    # Its one message and the broadcast behind it take what parts from every rank and a gather behind them would.
    operators=replace(MEGATRON_LM.operators, residual=Operator(forward=3, backward=4.5)),
    products=replace(MEGATRON_LM.products, accumulation_bytes=ADDING_BYTES),
    step_bytes=16,
    residual_dropout=False,
)


@dataclass(frozen=True)
class LaunchedLayers:
    """Layers on the roofline, launched as fast as PyTorch 1.7 could; an `OpTimes`."""

    roofline: Roofline

    def __call__(self, query: LayerQuery) -> LayerTimes:
        """See `OpTimes`."""
        times = self.roofline(query)
        half = LAYER_LAUNCH_S / 2
        return LayerTimes(times.forward, times.input_gradient, times.weight_gradient, LAYER_LAUNCH_S, half, half)


def cluster_of(setting: Setting) -> Cluster:
    """Return a cluster of as many nodes as the setting fills."""
    known = machine("p3.16xlarge")
    number = -(-num_devices(setting) // known.num_devices)
    nodes = (
        Node(
            name=f"p3-{index}",
            device=V100,
            num_devices=known.num_devices,
            inside=known.inside,
            network=known.network,
        )
        for index in range(number)
    )
    return Cluster(nodes=tuple(nodes), name=f"{number} p3.16xlarge")


def workload_of(setting: Setting) -> Workload:
    """Only layers: the authors ran neither embedding nor last norm nor head. Activation functions are ReLU."""
    hidden = setting.hidden_size
    layer = Layer(
        name="block",
        kind="block",
        tokens=setting.seq_length,
        hidden_size=hidden,
        parameters=12 * hidden**2 + 13 * hidden,
        unshared_parameters=6 * hidden,
        products=(
            Product(hidden, 3 * hidden, "column"),
            Product(hidden, hidden, "row"),
            Product(hidden, 4 * hidden, "column"),
            Product(4 * hidden, hidden, "row"),
        ),
        attention=Attention(setting.num_heads, setting.num_heads, hidden // setting.num_heads),
        num_norms=2,
        activation_width=4 * hidden,
    )
    number = setting.num_layers
    return Workload(
        name=setting.model, layers=(layer,) * number, seq_length=setting.seq_length, first_dealt=0, end_dealt=number
    )


def strategy_of(setting: Setting) -> Strategy:
    """Return the strategy of a setting; micro-batches have one sequence, as in all schemes of the paper.

    The authors' ranks run over tensor fastest, then pipe, then data: a pipeline is on as few nodes as can be.
    """
    data, pipe, tensor = setting.data_parallel_size, setting.pipeline_parallel_size, setting.tensor_parallel_size
    devices = np.arange(data * pipe * tensor).reshape(data, pipe, tensor).swapaxes(0, 1)
    return Strategy(
        data_parallel_size=data,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipe,
        global_batch_size=setting.global_batch_size,
        schedule="gpipe",
        zero_stage=0,
        placement=tuple(devices.reshape(-1).tolist()),
    )


def cost_model_of(setting: Setting) -> CostModel:
    """The product's cost model with the figures of this file."""
    return CostModel(
        workload_of(setting),
        cluster_of(setting),
        software=CODE,
        efficiency=PHYSICS,
        op_times=LaunchedLayers(Roofline(PHYSICS, CODE, "fp16")),
        precision="fp16",
    )


def num_devices(setting: Setting) -> int:
    """Devices of a setting."""
    return setting.data_parallel_size * setting.pipeline_parallel_size * setting.tensor_parallel_size
