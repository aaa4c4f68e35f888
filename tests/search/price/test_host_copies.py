"""Copies on hosts: bytes of devices and hosts, and the time of late copies."""

from dataclasses import replace

import numpy as np
import pytest

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.memory import TokenBytes, memory_over_time, peak
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.programs.host_copies import HostCopySettings
from deepspeed_ext.plan.simulate.host_copies import HostCopyPlan
from megatron_terapipe.search.machine.cluster import Cluster, HostMemory
from megatron_terapipe.search.price.activations import StageBytes, TokenMemory, orders_of_ranks, peak_held
from megatron_terapipe.search.price.cost_model import Pricing
from megatron_terapipe.search.price.makespan import ScheduleSimulator
from megatron_terapipe.search.price.memory import SHARE_OF_HOST
from megatron_terapipe.search.price.workload import gpt_workload
from megatron_terapipe.strategy import Strategy
from tests.search.price.machines import NODE, gpt

MODEL = gpt(16, 1024, 8, 16384, 1024, num_key_value_heads=4)
GPT = gpt_workload(MODEL)


def host_bytes(copies):
    """The most bytes that the copies of a rank take of its host at a time."""
    sizes, places = np.append(copies.size, -copies.size), np.append(copies.offload, copies.reader)
    return np.cumsum(sizes[np.lexsort((sizes, places))]).max()


STRATEGY = Strategy(
    pipeline_parallel_size=2,
    sequence_parallel_size=2,
    num_model_chunks=8,
    schedule="interleaved",
    num_token_slices=8,
    recompute="stage",
    offload=True,
    global_batch_size=1,
)


def cluster(memory_bytes: float = 2e12, bandwidth: float = 64e9) -> Cluster:
    return Cluster(nodes=(replace(NODE, host=HostMemory(memory_bytes=memory_bytes, bandwidth=bandwidth)),))


def test_bytes_and_links() -> None:
    pricing = Pricing(GPT, cluster())
    model = pricing.cost_model
    settings = model.host_copy_settings(model.placed(STRATEGY))
    # Two of four key heads of 128 channels, keys and values, one layer on a stage; inputs of half of the tokens.
    assert settings.key_value_bytes == (2 * 2 * 2 * 128,) * 16
    assert settings.input_bytes == (0.0, *(2 * 1024 / 2,) * 15)
    assert settings.to_host == settings.from_host == model.efficiency.host_efficiency * 64e9
    assert settings.host_bytes == SHARE_OF_HOST * 2e12 / 8


def test_devices_hold_tensors_that_are_needed_soon() -> None:
    pricing = Pricing(GPT, cluster())
    kept, copied = (pricing.memory(replace(STRATEGY, offload=offload)) for offload in (False, True))
    for there, here in zip(kept, copied, strict=True):
        # One of eight stages works, and the next one comes back meanwhile.
        assert here.activations + here.key_values < 0.45 * (there.activations + there.key_values)
        assert here.weights == there.weights and here.optimizer == there.optimizer
    plan = pricing.host_copies(STRATEGY)
    assert plan is not None and pricing.host_copies(replace(STRATEGY, offload=False)) is None
    most = host_bytes(plan.ranks[0])
    assert 0.5 < most / (8 * 16384 * 1024 + 7 * 16384 * 1024) < 1
    # Hosts with less memory keep less, and devices more.
    small = Pricing(GPT, cluster(memory_bytes=8 * most / SHARE_OF_HOST / 2))
    few = small.host_copies(STRATEGY)
    assert few is not None and host_bytes(few.ranks[0]) <= most / 2 * (1 + 1e-9)
    assert small.memory(STRATEGY)[0].total > copied[0].total
    # Keys and values of layers with a window are among activations, also where they are on hosts.
    windows = Pricing(gpt_workload(replace(MODEL, sliding_window=64)), cluster()).memory(STRATEGY)
    assert min(min(each.activations, each.key_values) for each in windows) >= 0 and windows[0].total < kept[0].total


def test_copies_over_slow_links_are_left_out_and_never_make_a_strategy_faster() -> None:
    plain = replace(STRATEGY, offload=False)
    for bandwidth in (64e9, 4e9, 1e6):
        pricing = Pricing(GPT, cluster(bandwidth=bandwidth))
        with_copies, without = (pricing.predict(each) for each in (STRATEGY, plain))
        assert with_copies.iteration_time_s >= without.iteration_time_s * (1 - 1e-9)
        assert with_copies.breakdown.total_s == pytest.approx(with_copies.iteration_time_s)
        waiting = with_copies.iteration_time_s - without.iteration_time_s
        assert with_copies.breakdown.host_copy_s == pytest.approx(waiting, abs=1e-9)
    assert with_copies.memory == without.memory


@pytest.mark.parametrize(("schedule", "micro_batches"), [("interleaved", 1), ("breadth-first", 3), ("interleaved", 4)])
def test_bytes_are_those_of_the_plan(schedule: str, micro_batches: int) -> None:
    """The peak by the order of the ops is that of the plan over time, where copies take no time."""
    shape = PipelineShape(6, micro_batches, 3, 3)
    lengths, inputs, keys = (5, 3, 4), tuple(2.0 * (stage > 0) for stage in range(6)), (3.0,) * 6
    ones = ((1.0,) * 3,) * 6
    costs = OpCosts(ones, ones)
    simulated = ScheduleSimulator().orders(schedule, shape).simulate(costs)
    settings = HostCopySettings(lengths=lengths, input_bytes=inputs, key_value_bytes=keys)
    plan = HostCopyPlan.of(simulated.columns(), shape, settings)
    timeline = simulated.compiled.simulate(costs, plan).timeline()
    nothing = (0.0,) * 6
    curves = memory_over_time(timeline, lengths, TokenBytes(nothing, keys, nothing, stage_input=inputs))
    of_token = TokenMemory(np.array(inputs), np.array(keys), freed_by_input_gradient=np.array(inputs))
    of_stage = StageBytes(of_token, is_recomputed=True)
    assert all(len(copies.size) for copies in plan.ranks)
    (order,) = orders_of_ranks(schedule, shape)
    held = peak_held(order, lengths, of_stage, plan.ranks)
    assert held.activations + held.key_values == pytest.approx(list(map(peak, curves)))
