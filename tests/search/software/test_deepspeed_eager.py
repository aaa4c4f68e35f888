"""Layers in plain PyTorch take what Sailor's authors measured of one layer on one GPU.

Their figures: github.com/eth-easl/sailor, sailor/Planner/sailor_planner/profiles/GPT-Neo-2.7/GH-96/profile.json.
"""

import pytest

from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.search.machine.library import device
from megatron_terapipe.search.machine.trainers import DEEPSPEED_EAGER
from megatron_terapipe.search.price.efficiency import HardwareEfficiency, reachable_bandwidth
from megatron_terapipe.search.price.layer_times import LayerQuery
from megatron_terapipe.search.price.roofline import Roofline
from megatron_terapipe.search.price.workload import gpt_workload

GPT_NEO = gpt_workload(
    ModelConfig(num_layers=32, hidden_size=2560, num_attention_heads=32, seq_length=2048, vocab_size=128256)
)
BLOCK, GH200 = GPT_NEO.layers[1], device("GH200-96GB")
EFFICIENCY = HardwareEfficiency()


@pytest.mark.parametrize(
    ("sequences", "forward_s", "backward_s", "within"), [(16, 36.5e-3, 97.8e-3, 0.02), (1, 2.13e-3, 5.83e-3, 0.1)]
)
def test_a_layer_takes_what_its_authors_measured(
    sequences: int, forward_s: float, backward_s: float, within: float
) -> None:
    query = LayerQuery(BLOCK, GH200, tensor_parallel_size=1.0, micro_batch_size=float(sequences), start=0.0, end=2048.0)
    times = Roofline(EFFICIENCY, DEEPSPEED_EAGER, "fp16")(query)
    assert times.forward == pytest.approx(forward_s, rel=within)
    assert times.input_gradient + times.weight_gradient == pytest.approx(backward_s, rel=within)


def test_a_step_takes_what_its_authors_measured() -> None:
    moved = EFFICIENCY.optimizer_passes * DEEPSPEED_EAGER.step_bytes * BLOCK.parameters
    seconds = moved / (reachable_bandwidth(GH200) * EFFICIENCY.memory_efficiency)
    assert seconds == pytest.approx(2.86e-3, rel=0.02)
