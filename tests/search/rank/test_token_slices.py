"""Token slices for the schedule that runs: tables against the cost model, the search against every cut there is."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.schedules import schedule_named
from deepspeed_ext.plan.simulate.compiled import CompiledOrders
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.plan.solve.cuts import CutGrid, PolynomialCosts, op_costs
from examples.terapipe.settings import solve_batch
from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.devices import Device
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.machine.trainers import MEGATRON_LM, TERAPIPE
from megatron_terapipe.search.price.cost_model import CostModel
from megatron_terapipe.search.price.workload import gpt_workload
from megatron_terapipe.search.rank.token_slices import ExtrapolatedSchedule, TabulatedCosts, solve_cut
from megatron_terapipe.strategy import Strategy
from tests.plan.solve.cuts import all_cuts
from tests.search.problems import node

DEVICE = Device(name="card", memory_bytes=4e10, memory_bandwidth=1e12, half_flops=1e14, single_flops=1e13)
SLOW = replace(DEVICE, name="slow card", half_flops=5e13)
MODEL = ModelConfig(num_layers=8, hidden_size=4096, num_attention_heads=32, seq_length=4096, vocab_size=32000)


def cluster(*devices):
    return Cluster(nodes=tuple(node(f"node{index}", device, network=3e9) for index, device in enumerate(devices)))


BLOCKING = replace(MEGATRON_LM, communication=replace(MEGATRON_LM.communication, shares_transfers=False))


def model(software=TERAPIPE, devices=(DEVICE, DEVICE, DEVICE, SLOW), seq_length=4096):
    return CostModel(gpt_workload(replace(MODEL, seq_length=seq_length)), cluster(*devices), software=software)


pipeline = partial(Strategy, tensor_parallel_size=2, pipeline_parallel_size=4, global_batch_size=4)


@pytest.mark.parametrize("software", [TERAPIPE, BLOCKING], ids=["overlapped", "blocking"])
@pytest.mark.parametrize(
    "strategy",
    [
        pipeline(),
        pipeline(schedule="zero-bubble", micro_batch_size=2),
        pipeline(schedule="interleaved", num_model_chunks=2),
        pipeline(sequence_parallel=True, recompute="full", stage_partition=(0, 1, 3, 6, 8)),
    ],
    ids=["1f1b", "zero-bubble", "interleaved", "recompute"],
)
def test_tables_equal_the_cost_model(software, strategy):
    cost_model, cut = model(software), TokenSlices((1536, 1024, 512, 1024))
    table = TabulatedCosts.of(cost_model, strategy, CutGrid(4096, 512, 512))
    shape = PipelineShape(
        strategy.pipeline_parallel_size * strategy.num_model_chunks,
        strategy.num_micro_batches,
        len(cut),
        strategy.num_model_chunks,
    )
    whole = cost_model.pipeline_costs(strategy)
    expected = cost_model.pipeline_costs(replace(strategy, num_token_slices=4, token_slices=cut.lengths))
    mine = op_costs(shape, cut, table, whole.transfer)
    assert np.allclose(mine.forward, expected.forward, rtol=1e-9)
    assert np.allclose(mine.backward, expected.backward, rtol=1e-9)
    if expected.weight_gradient is not None:
        assert np.allclose(mine.weight_gradient, expected.weight_gradient, rtol=1e-9)
    if software.communication.overlaps_transfers:
        sent = [
            [costs.sending_time(boundary, one) for one in range(4)] for costs in (mine, expected) for boundary in (0, 2)
        ]
        assert np.allclose(sent[:2], sent[2:])


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
def test_many_micro_batches_are_extrapolated(name):
    model_chunks = 2 if name == "interleaved" else 1
    shape = PipelineShape(4 * model_chunks, 600, 3, model_chunks)
    costs = PolynomialCosts.of_layers([1] * (4 * model_chunks), 12, 0.2, fixed=0.01, head_time=0.3)
    cut = TokenSlices((5, 4, 3))
    evaluation = ExtrapolatedSchedule(schedule_named(name), shape, costs, 0.01)
    orders = CompiledOrders.of_schedule(schedule_named(name), shape)
    assert evaluation(cut) == pytest.approx(orders.simulate(op_costs(shape, cut, costs, 0.01)).makespan, rel=2e-3)
    assert evaluation.num_ops < 600 * 2 * 4 * model_chunks * 3


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_hardly_any_cut_is_better(schedule):
    cost_model, strategy = model(), pipeline(schedule=schedule, global_batch_size=3)
    solved = solve_cut(cost_model, strategy, counts=(1, 2, 3, 4), granularity=512)
    best = min(
        cost_model.predict_time(replace(strategy, num_token_slices=len(cut), token_slices=cut.lengths)).iteration_time_s
        for cut in all_cuts(4096, (1, 2, 3, 4), 512)
    )
    assert solved.iteration_time_s <= best * 1.003
    assert solved.iteration_time_s == min(each.iteration_time_s for each in solved.alternatives)
    assert [len(each.token_slices) for each in solved.alternatives] == [1, 2, 3, 4]


def test_without_counts_it_finds_a_good_number():
    cost_model, strategy = model(), pipeline(global_batch_size=2)
    found = solve_cut(cost_model, strategy)
    every = solve_cut(cost_model, strategy, counts=range(1, 17))
    assert found.iteration_time_s <= every.iteration_time_s * 1.005
    unsliced = found.alternatives[0]
    assert unsliced.token_slices == (4096,)
    assert found.iteration_time_s < unsliced.iteration_time_s


@pytest.mark.parametrize(("seq_length", "count"), [(4096, 3), (1000, 3), (1000, 20)])
def test_the_trainer_takes_the_cut(seq_length, count):
    strategy = pipeline(sequence_parallel=True)
    solved = solve_cut(model(seq_length=seq_length), strategy, counts=(count,))
    flags = (
        f"--num-layers 8 --hidden-size 4096 --num-attention-heads 32 --seq-length {seq_length} --micro-batch-size 1 "
        "--train-iters 1 --lr 1e-3 --data-path corpus --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 "
        f"--sequence-parallel --num-token-slices {count} --token-slices {','.join(map(str, solved.token_slices))}"
    )
    config = parse_arguments(flags.split())
    assert config.token_slices().lengths == solved.token_slices


def test_sequences_without_causal_attention_stay_whole():
    cost_model = model()
    block = cost_model.workload.layers[1]
    windows = replace(block, attention=replace(block.attention, causal=False))
    workload = replace(cost_model.workload, layers=(windows,) * 8, first_dealt=0, end_dealt=8)
    solved = solve_cut(CostModel(workload, cluster(DEVICE, DEVICE, DEVICE, DEVICE)), pipeline())
    assert solved.token_slices == (4096,)


def test_more_token_slices_than_tokens():
    with pytest.raises(ConfigError, match=r"cannot be cut into 100 token slices .*give another number"):
        solve_cut(model(seq_length=64), pipeline(), counts=(100,))


def test_a_batch_of_sequences_is_cut_into_micro_batches_too():
    strategy = pipeline(global_batch_size=4, schedule="gpipe")
    joint = solve_batch(model(MEGATRON_LM), strategy, sizes=(1, 2), granularity=256)
    assert sum(size for size, _ in joint.micro_batches) == 4
    alone = solve_batch(model(MEGATRON_LM), strategy, sizes=(2,), equal_sizes=True, granularity=256)
    assert joint.makespan <= alone.makespan * 1.001
