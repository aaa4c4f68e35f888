"""Layers of experts: time, exchanges, memory and the step, by hand."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.measuring.closed_forms import block_activation_bytes_per_token
from megatron_terapipe.config import ModelConfig, flops
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.machine.cluster import Link
from megatron_terapipe.search.machine.library import device
from megatron_terapipe.search.machine.trainers import FSDP, MEGATRON_CORE, TERAPIPE
from megatron_terapipe.search.price.activations import LayerMemory
from megatron_terapipe.search.price.cost_model import CostModel, Pricing
from megatron_terapipe.search.price.efficiency import HardwareEfficiency
from megatron_terapipe.search.price.layer_times import LayerQuery
from megatron_terapipe.search.price.links import ALONE, GroupTopology, LayerLinks, all_gather_s, all_to_all_s
from megatron_terapipe.search.price.memory import MemoryModel
from megatron_terapipe.search.price.profile_times import MeasuredProfile
from megatron_terapipe.search.price.roofline import Roofline
from megatron_terapipe.search.price.stages import LayerPrices
from megatron_terapipe.search.price.workload import IMBALANCE, gpt_workload
from megatron_terapipe.strategy import Strategy
from tests.search.price.machines import A100, nodes
from tests.search.price.profiles import profile

TOKENS = 4096.0
MODEL = ModelConfig(
    **{"num_layers": 2, "hidden_size": 1024, "num_attention_heads": 8, "seq_length": int(TOKENS), "vocab_size": 1000},
    **{"num_experts": 16, "moe_router_topk": 4, "moe_ffn_hidden_size": 512, "activation": "swiglu"},
    disable_bias_linear=True,
)
PLAIN = gpt_workload(MODEL)
EXPERTS = PLAIN.layers[1]
SHARED = gpt_workload(replace(MODEL, moe_shared_expert_intermediate_size=2048)).layers[1]
INSIDE = GroupTopology(4, 1.0, 200e9, 3e-6, 1.0, 0.0)
COST_MODEL = CostModel(PLAIN, nodes(2), efficiency=HardwareEfficiency(launch_s=1e-9))
"""Without launches, which small layers would wait for."""


def query(layer=EXPERTS, ranks: float = 4.0, **more: object) -> LayerQuery:
    values = {"tensor_parallel_size": 1.0, "micro_batch_size": 1.0, "start": 0.0, "end": TOKENS} | more
    return LayerQuery(layer, A100, expert_parallel_size=ranks, **values)


def priced(layer=EXPERTS, topology: GroupTopology = INSIDE, **more: object):
    prices = COST_MODEL.prices
    ranks = float(topology.size)
    return prices.of_layer(query(layer, ranks, **more), LayerLinks(ALONE, ALONE, topology))


def with_experts(**changes: object):
    assert EXPERTS.experts is not None
    return replace(EXPERTS, experts=replace(EXPERTS.experts, **changes))


def test_flops_are_those_of_the_trainer() -> None:
    block = MODEL.blocks[0]
    assert EXPERTS.linear_flops_per_token == flops.linear_flops_per_token(MODEL, block)
    assert EXPERTS.parameters == flops.block_parameters(MODEL, block)
    assert SHARED.linear_flops_per_token - EXPERTS.linear_flops_per_token == 2 * 3 * 1024 * 2048


def test_scores_of_experts_in_bf16_are_faster() -> None:
    in_fp32 = replace(MEGATRON_CORE, products=replace(MEGATRON_CORE.products, router_precision="fp32"))
    fast, slow = (Roofline(HardwareEfficiency(), software)(query()) for software in (MEGATRON_CORE, in_fp32))
    assert fast.forward < slow.forward and fast.weight_gradient < slow.weight_gradient


def test_products_depend_on_the_tokens_of_an_expert() -> None:
    """As many rows of fewer experts are faster: fuller tiles, and fewer weights to read and gradients to add."""
    even = with_experts(imbalance=1.0)
    seconds = [COST_MODEL.op_times(query(even, ranks)) for ranks in (2.0, 4.0)]
    for op in ("forward", "input_gradient", "weight_gradient"):
        assert np.all(np.diff([float(getattr(each, op)) for each in seconds]) < 0), op
    # With many tokens the time is that of the FLOPs of the chosen experts.
    one, two = (COST_MODEL.op_times(query(even, end=length)) for length in (2.0**20, 2.0**21))
    rate = A100.half_flops * COST_MODEL.efficiency.gemm_efficiency
    assert float(two.weight_gradient - one.weight_gradient) >= 2.0**20 * EXPERTS.linear_flops_per_token / rate


def test_the_rank_with_most_tokens_counts() -> None:
    even, usual, all_on_one = (
        priced(with_experts(imbalance=factor, dispatcher="alltoall")) for factor in (1.0, IMBALANCE, 4.0)
    )
    assert even.forward < usual.forward < all_on_one.forward
    assert even.expert_exchange < usual.expert_exchange < all_on_one.expert_exchange
    # A rank with all experts has all rows of its tokens.
    alone = [priced(with_experts(imbalance=factor), ALONE).forward for factor in (1.0, 4.0)]
    assert alone[0] == alone[1]


def test_exchanges_by_hand() -> None:
    efficiency = COST_MODEL.efficiency
    row = 2 * 1024
    there = all_to_all_s(row * TOKENS * 4 * IMBALANCE, INSIDE, efficiency)
    drain = efficiency.collective_s + efficiency.launch_s
    # There and back, forward and backward; the host waits for sizes in forwards only, and not in repeated ones.
    assert priced().expert_exchange == pytest.approx(4 * there + drain)
    assert priced(recompute="full").expert_exchange == pytest.approx(6 * there + drain)
    gather = all_gather_s(row * TOKENS * 4, INSIDE, efficiency)
    assert priced(with_experts(dispatcher="allgather")).expert_exchange == pytest.approx(4 * gather)
    # Tensor-parallel ranks route a part of the tokens each.
    half = all_to_all_s(row * TOKENS / 2 * 4 * IMBALANCE, INSIDE, efficiency)
    parts = priced(tensor_parallel_size=2.0, sequence_parallel=True)
    assert parts.expert_exchange == pytest.approx(4 * half + drain)
    between = priced(topology=INSIDE._replace(num_nodes=2, network_bandwidth=25e9, network_latency_s=5e-6))
    assert between.expert_exchange > 3 * priced().expert_exchange
    assert priced(topology=ALONE).expert_exchange == 0


def test_activation_casts_and_copies_inside_products_of_experts() -> None:
    asked = replace(query(with_experts(dispatcher="alltoall")), device=device("B200-SXM-180GB"))
    of = {
        (fused, precision): Roofline(
            COST_MODEL.efficiency,
            replace(MEGATRON_CORE, products=replace(MEGATRON_CORE.products, fuses_experts=fused)),
            precision,
        )
        for fused in (False, True)
        for precision in ("bf16", "mxfp8")
    }
    found = {key: prices(asked) for key, prices in of.items()}
    assert found[False, "bf16"] == found[True, "bf16"]
    rows, moving = TOKENS * 4 * IMBALANCE, of[True, "mxfp8"]._moving_s
    # An activation reads and writes five numbers and its output is cast; then it is only written, in 8 bits twice. Rows
    # are copied before and after the products, or nowhere.
    saved = moving(asked.device, rows * 512 * (5 * 2 + 4 - 2) + rows * 1024 * 2 * 4)
    assert found[False, "mxfp8"].forward - found[True, "mxfp8"].forward == pytest.approx(saved)


def test_limits_and_factors_are_kernels_of_their_own_in_megatron_core() -> None:
    clamped, rotating = with_experts(dispatcher="alltoall"), EXPERTS.rotary_channels or 1024
    layers = [
        replace(clamped, rotary_channels=rotating, clamped=clamps, scales_rotations=scales)
        for clamps, scales in ((False, False), (True, False), (False, True))
    ]
    for software, kernels in ((MEGATRON_CORE, True), (TERAPIPE, False), (FSDP, False)):
        roofline = Roofline(COST_MODEL.efficiency, software, "bf16")
        usual, with_limits, scaled = (roofline(query(layer)) for layer in layers)
        expected = 8 * 2 * 512 * TOKENS * 4 * IMBALANCE, 10 * 2 * rotating * TOKENS
        for found, num_bytes in zip((with_limits, scaled), expected, strict=True):
            more = found.forward - usual.forward
            assert more == pytest.approx(kernels * roofline._moving_s(A100, num_bytes))
            assert (found.input_gradient > usual.input_gradient) == kernels


@pytest.mark.parametrize("token_slices", [None, (32, 4064)])
def test_auto_is_the_faster_dispatcher_in_time_and_memory(token_slices: tuple[int, ...] | None) -> None:
    """Over a slow network all tokens go to both ranks, where eight experts of each would be sent more.

    All token slices have one dispatcher, though a short one would be faster with the other.
    """
    model, count = replace(MODEL, moe_router_topk=8), len(token_slices or "1")
    strategy = Strategy(data_parallel_size=2, expert_parallel_size=2, global_batch_size=4, num_token_slices=count)
    strategy = replace(strategy, token_slices=token_slices)
    for gigabits, taken in ((1e6, "alltoall"), (0.1, "allgather")):
        network = Link(bandwidth=gigabits / 8 * 1e9, latency_s=1e-6)
        cluster = nodes(2, num_devices=1, num_network_cards=1, network=network)
        prices = {each: Pricing(gpt_workload(replace(model, moe_token_dispatcher_type=each)), cluster) for each in ALL}
        auto, *others = (prices[each].predict(strategy) for each in ALL)
        assert prices["auto"].cost_model.dispatched(strategy).workload.experts.dispatcher == taken
        faster = min(others, key=lambda each: each.iteration_time_s)
        assert faster is others[ALL.index(taken) - 1] and others[0].memory != others[1].memory
        assert auto.iteration_time_s == pytest.approx(faster.iteration_time_s) and auto.memory == faster.memory


ALL = ("auto", "alltoall", "allgather")


def test_shared_experts_run_under_exchanges() -> None:
    waiting = replace(TERAPIPE.communication, overlaps_shared_experts=False)
    one_by_one = replace(COST_MODEL.prices, communication=waiting)
    links = LayerLinks(ALONE, ALONE, INSIDE)
    hidden, exposed = (each.of_layer(query(SHARED), links) for each in (COST_MODEL.prices, one_by_one))
    assert hidden.expert_exchange < 0.5 * exposed.expert_exchange
    assert exposed.expert_exchange == pytest.approx(float(priced().expert_exchange))
    assert isinstance(one_by_one, LayerPrices)


def strategy(**sizes: object) -> Strategy:
    return Strategy(**{"data_parallel_size": 16, "global_batch_size": 16, "zero_stage": 1} | sizes)


def test_states_by_hand() -> None:
    memory = MemoryModel(workload=PLAIN, cluster=nodes(2))
    experts = 2 * 16 * 3 * 1024 * 512
    dense = PLAIN.parameters - experts
    for ranks, tensor, copies in ((1, 1, 16), (8, 1, 2), (16, 1, 1), (4, 2, 4)):
        one = strategy(
            data_parallel_size=16 // tensor,
            tensor_parallel_size=tensor,
            sequence_parallel=tensor > 1,
            expert_parallel_size=ranks,
        )
        (held,) = memory.count(one)
        unshared = sum(layer.unshared_parameters for layer in PLAIN.layers)
        of_rank = unshared + (dense - unshared) / tensor
        assert held.weights == pytest.approx(2 * (of_rank + experts / ranks))
        assert held.gradients == pytest.approx(4 * (of_rank + experts / ranks))
        # ZeRO 1 divides the state of experts among the ranks with the same experts.
        assert held.optimizer == pytest.approx(12 * (of_rank / (16 // tensor) + experts / ranks / copies))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("shared", [None, 2048])
def test_activations_are_those_of_the_closed_form(recompute: str, shared: int | None) -> None:
    model = replace(MODEL, moe_shared_expert_intermediate_size=shared, moe_shared_expert_gate=shared is not None)
    block, layer = model.blocks[0], gpt_workload(model).layers[1]
    sizes = {"layer": layer, "software": TERAPIPE, "element_bytes": 2, "sequence_parallel": False}
    found = LayerMemory(**sizes, tensor_parallel_size=1).of_token(recompute)
    expected = block_activation_bytes_per_token(model, block, 2, recompute)
    assert found.activations + found.key_values == expected
    # The rank with most tokens keeps their rows; with `allgather` each keeps those of all ranks.
    shares = LayerMemory(**sizes, tensor_parallel_size=1, expert_parallel_size=4).of_token(recompute)
    row = 4 * ((1024 + 2 * 512) * 2 + flops.ROW_BYTES)
    more = (IMBALANCE - 1) * row if recompute != "full" else 0
    assert shares.activations - found.activations == pytest.approx(more)


def test_profiles_have_no_layers_of_experts() -> None:
    measured = MeasuredProfile(profile())
    assert not measured.covers(PLAIN)
    with pytest.raises(ConfigError, match="layers of experts are not measured, and the model has some: drop --profile"):
        measured(query())


def test_parts_of_a_prediction() -> None:
    """Documents of dense models have no key of experts."""
    alone, shares = (COST_MODEL.predict_time(strategy(expert_parallel_size=size)) for size in (1, 8))
    assert "expert_exchange_s" not in alone.to_json()["breakdown"]
    assert shares.to_json()["breakdown"]["expert_exchange_s"] == shares.breakdown.expert_exchange_s > 0
    assert shares.breakdown.total_s == pytest.approx(shares.iteration_time_s)
    assert any("1.25 times the mean" in note for note in shares.notes) and not alone.notes
    (few,) = COST_MODEL.predict_time(strategy(num_token_slices=8)).notes
    assert few.startswith("an expert has 128 tokens of a token slice")
    # Gradients of experts are reduced over fewer ranks, which have less of them.
    assert shares.breakdown.gradient_reduction_s < alone.breakdown.gradient_reduction_s
    document = strategy(expert_parallel_size=8).to_json()
    assert Strategy.from_json(document).expert_parallel_size == document["expert_parallel_size"] == 8
    assert "expert_parallel_size" not in strategy().to_json()
