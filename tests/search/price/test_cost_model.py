"""The time of an iteration."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.plan.costs import TransferCosts
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.learn.fit import times_with
from megatron_terapipe.search.learn.priors import Prior, moved
from megatron_terapipe.search.machine.cluster import Cluster, Node
from megatron_terapipe.search.machine.software import Software
from megatron_terapipe.search.machine.trainers import MEGATRON_LM, TERAPIPE
from megatron_terapipe.search.price.cost_model import CostModel
from megatron_terapipe.search.price.efficiency import HardwareEfficiency
from megatron_terapipe.search.price.layer_times import LayerQuery, LayerTimes
from megatron_terapipe.search.price.stages import LayerCounter, reductions
from megatron_terapipe.search.price.workload import Workload, gpt_workload
from megatron_terapipe.strategy import Strategy
from tests.search.price.machines import A100, GPT, NODE, nodes, strategy
from tests.search.problems import small_model

TWO = nodes(2)


def seconds(cluster: Cluster, software: Software = MEGATRON_LM, **changes: object) -> float:
    return CostModel(GPT, cluster, software=software).predict_time(strategy(**changes)).iteration_time_s


def test_the_breakdown_adds_up() -> None:
    for software in (TERAPIPE, MEGATRON_LM):
        predicted = CostModel(GPT, TWO, software=software).predict_time(strategy())
        assert predicted.breakdown.total_s == predicted.iteration_time_s
        assert all(getattr(predicted.breakdown, each.name) >= 0 for each in fields(predicted.breakdown))
        assert 0 < predicted.bubble_ratio < 0.5


class Given:
    """Op times that a test gives: seconds by kind of layer."""

    def __call__(self, query: LayerQuery) -> LayerTimes:
        time = {"embedding": 0.0, "block": 1.0, "norm": 0.0, "head": 2.0}[query.layer.kind] + np.zeros_like(query.start)
        return LayerTimes(time, time, time)


def test_layers_are_added_up_by_stage() -> None:
    model = CostModel(GPT, TWO, op_times=Given())
    costs = model.pipeline_costs(strategy(tensor_parallel_size=1, data_parallel_size=4))
    assert [row[0] for row in costs.forward] == [6.0, 6.0, 6.0, 8.0]
    assert [row[0] for row in costs.backward] == [12.0, 12.0, 12.0, 16.0]
    assert isinstance(costs.transfer, TransferCosts)
    split = model.pipeline_costs(strategy(schedule="zero-bubble", tensor_parallel_size=1, data_parallel_size=4))
    assert split.weight_gradient is not None
    assert [row[0] for row in split.weight_gradient] == [6.0, 6.0, 6.0, 8.0]


def test_a_stage_is_as_slow_as_its_slowest_device() -> None:
    slow = replace(A100, name="slow", half_flops=100e12)
    mixed = Cluster(nodes=(NODE, replace(NODE, device=slow)))
    model = CostModel(GPT, mixed, software=MEGATRON_LM)
    by_stage = [row[0] for row in model.pipeline_costs(strategy()).forward]
    assert by_stage[2] > 1.5 * by_stage[1]
    # With replicas on both nodes the stage is as slow as the slow ones.
    replicas = strategy(data_parallel_size=16, tensor_parallel_size=1, pipeline_parallel_size=1)
    both, fast = (CostModel(GPT, cluster, software=MEGATRON_LM).pipeline_costs(replicas) for cluster in (mixed, TWO))
    assert both.forward[0][0] > 1.5 * fast.forward[0][0]


def test_the_tied_embedding_is_reduced_where_two_ranks_hold_it() -> None:
    model = CostModel(GPT, TWO, software=MEGATRON_LM)
    assert model.predict_time(strategy()).breakdown.shared_weight_s > 0
    whole = strategy(data_parallel_size=8, pipeline_parallel_size=1)
    assert model.predict_time(whole).breakdown.shared_weight_s == 0


@pytest.mark.parametrize("software", [TERAPIPE, MEGATRON_LM])
def test_sequence_parallel_ranks_send_only_their_tokens(software: Software) -> None:
    model = CostModel(GPT, TWO, software=software)
    whole, parts = (
        strategy(tensor_parallel_size=4, data_parallel_size=1, sequence_parallel=on) for on in (False, True)
    )
    sent = [model.messages(model.placed(one))[0] for one in (whole, parts)]
    assert sent[1] == pytest.approx(sent[0] / 4)
    transfers = [model.predict_time(one).breakdown.transfer_s for one in (whole, parts)]
    assert transfers[1] < transfers[0]


def improved(factor: float) -> dict[str, Node]:
    """The node with one part better by a factor."""
    inside, network = NODE.inside, NODE.network
    device = NODE.device
    return {
        "inside": replace(NODE, inside=replace(inside, bandwidth=inside.bandwidth * factor)),
        "network": replace(NODE, network=replace(network, bandwidth=network.bandwidth * factor)),
        "cards": replace(NODE, num_network_cards=4 * int(factor)),
        "latency of network": replace(NODE, network=replace(network, latency_s=network.latency_s / factor)),
        "latency inside": replace(NODE, inside=replace(inside, latency_s=inside.latency_s / factor)),
        "memory": replace(NODE, device=replace(device, memory_bandwidth=device.memory_bandwidth * factor)),
        "flops": replace(NODE, device=replace(device, half_flops=device.half_flops * factor)),
    }


@settings(max_examples=25, deadline=None)
@given(
    part=st.sampled_from(sorted(improved(1.0))),
    factor=st.floats(1, 8),
    layout=st.sampled_from([(2, 2, 4), (16, 1, 1), (1, 16, 1), (1, 8, 2), (4, 4, 1), (2, 1, 8)]),
    software=st.sampled_from([TERAPIPE, MEGATRON_LM]),
    schedule=st.sampled_from(["1f1b", "gpipe", "zero-bubble"]),
    token_slices=st.sampled_from([1, 4]),
)
def test_a_better_cluster_is_never_slower(
    part: str, factor: float, layout: tuple[int, int, int], software: Software, schedule: str, token_slices: int
) -> None:
    names = ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size")
    values = dict(zip(names, layout, strict=True)) | {"num_token_slices": token_slices, "schedule": schedule}
    better, usual = (
        seconds(nodes, software, **values) for nodes in (Cluster(nodes=(improved(factor)[part],) * 2), TWO)
    )
    assert better <= usual * (1 + 1e-9)


def test_a_strategy_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="cluster has 16 devices"):
        seconds(TWO, data_parallel_size=4)
    with pytest.raises(ConfigError, match="stage_partition"):
        seconds(TWO, stage_partition=(0, 3, 24))


@pytest.mark.parametrize("software", [TERAPIPE, MEGATRON_LM])
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_the_closed_form_with_many_constants(software: Software, schedule: str) -> None:
    layouts = [(2, 2, 4), (16, 1, 1), (1, 8, 2), (2, 1, 8)]
    members = [
        strategy(
            data_parallel_size=dp,
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            micro_batch_size=size,
            schedule=schedule,
            global_batch_size=128,
        )
        for dp, tp, pp in layouts
        for size in (1, 4)
    ]
    models = [CostModel(GPT, TWO, software=software)] * len(members)
    efficiency = HardwareEfficiency(gemm_efficiency=0.6, network_efficiency=0.4)
    then = models[0].with_constants(efficiency)
    alone = np.array([then.predict_time(one).iteration_time_s for one in members])
    ratio = np.array([then.closed_form_s(one)[0] for one in members]) / alone
    # The embedding and the head make stages uneven, which a closed form rounds off.
    assert ratio == pytest.approx(1, rel=0.1)
    single = [one.pipeline_parallel_size == 1 for one in members]
    assert ratio[single] == pytest.approx(1, rel=1e-9)
    constants = [moved(efficiency, {name: 0.1}) for name in Prior.of(efficiency).names]
    one_by_one = np.array([times_with(models, members, [each])[0] for each in constants])
    assert times_with(models, members, constants) == pytest.approx(one_by_one, rel=1e-12)


SMALL = {"num_layers": 4, "seq_length": 2048, "num_key_value_heads": 4}
GROUPED, OF_EXPERTS = (
    gpt_workload(small_model(**SMALL, **more)) for more in ({}, {"num_experts": 16, "moe_ffn_hidden_size": 512})
)


@pytest.mark.parametrize(
    ("workload", "layouts"),
    [
        *(
            (GROUPED, [{"sequence_parallel_size": size, "recompute": mode} for size in (2, 4, 8)])
            for mode in ("full", "stage")
        ),
        (OF_EXPERTS, [{"data_parallel_size": 16, "expert_parallel_size": size} for size in (1, 2, 16)]),
    ],
)
def test_the_closed_form_without_pipelines_is_exact(workload: Workload, layouts: list[dict[str, object]]) -> None:
    model = CostModel(workload, TWO, efficiency=HardwareEfficiency(launch_s=1e-9))
    members = [Strategy(**{"global_batch_size": 16, **each}) for each in layouts]  # type: ignore[arg-type]
    (together,) = times_with([model] * len(members), members, [model.efficiency])
    assert together == pytest.approx([model.predict_time(one).iteration_time_s for one in members], rel=1e-9)


def test_attention_and_mlp_side_by_side_are_summed_once_where_the_trainer_does_so() -> None:
    beside = gpt_workload(small_model(parallel_residual=True)).layers[1]
    assert (reductions(beside), reductions(beside, sums_at_once=True)) == ((2, 2), (2, 1))
    for model in (small_model(), small_model(parallel_residual=True, hidden_dropout=0.1)):
        assert reductions(gpt_workload(model).layers[1], sums_at_once=True) == (2, 2)
    assert TERAPIPE.communication.sums_at_once and not MEGATRON_LM.communication.sums_at_once


EMBEDDING = GPT.layers[0].shared_parameters


@pytest.mark.parametrize(
    ("stages", "ranks", "tensor", "total", "shared"),
    [
        *((model_chunks, 1, 1, GPT.parameters, [0]) for model_chunks in (1, 2)),
        (8, 4, 1, GPT.parameters + EMBEDDING, [EMBEDDING, 0, 0, EMBEDDING]),
        (2, 2, 4, pytest.approx((GPT.parameters + EMBEDDING) / 4, rel=0.01), [EMBEDDING / 4] * 2),
    ],
)
def test_a_tied_embedding_is_there_once_on_a_rank_and_known_to_be_shared_by_two(
    stages: int, ranks: int, tensor: int, total: object, shared: list[float]
) -> None:
    counts = LayerCounter(GPT).count(GPT.partition("uniform", stages), ranks, tensor)
    assert counts.parameters.sum() == total and counts.shared_parameters.tolist() == shared


def test_layers_are_counted_by_kind() -> None:
    counter = LayerCounter(GPT)
    counts = counter.count(GPT.partition("uniform", 8), 4, 1)
    assert counts.per_stage.sum() == counts.per_rank.sum() == len(GPT.layers)
    for stage, layers in enumerate(GPT.stages(GPT.partition("uniform", 8))):
        kinds = [GPT.layers[index] for index in layers]
        expected = [sum(each is kind for each in kinds) for kind in counter.kinds]
        assert counts.per_stage[stage].tolist() == expected
        if stage < 7:
            assert counts.last_layers[stage] == layers[-1]


def test_vocabulary_stages_have_equal_parts_of_the_head() -> None:
    untied = tuple(replace(layer, shared_weight=None, shared_parameters=0) for layer in GPT.layers)
    workload = replace(GPT, layers=untied)
    counter, partition = LayerCounter(workload), workload.partition("uniform", 2)
    whole, cut = (counter.count(partition, 2, 1, vocabulary_stages=stages) for stages in (False, True))
    head = [layer.kind for layer in counter.kinds].index("head")
    assert cut.per_stage[:, head].tolist() == [0, 0, 0.5, 0.5]
    assert cut.per_stage.sum(axis=0).tolist() == whole.per_stage.sum(axis=0).tolist()
    half = untied[-1].parameters / 2
    assert (cut.parameters - whole.parameters).tolist() == [half, -half]
    # After the last transformer layer every stage receives the output of the final norm.
    assert cut.last_layers.tolist()[1:] == [len(untied) - 2] * 2


def test_a_tied_head_cannot_be_cut() -> None:
    with pytest.raises(ConfigError, match="leave vocabulary_stages false"):
        LayerCounter(GPT).count(GPT.partition("uniform", 2), 2, 1, vocabulary_stages=True)
