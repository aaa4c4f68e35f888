"""Replicas of a pipeline on unlike nodes: each is a pipeline of its own, and the slowest ends the iteration."""

import random
from dataclasses import replace

import numpy as np
import pytest

from megatron_terapipe.search.machine.cluster import Cluster, Link, Node
from megatron_terapipe.search.machine.software import Software
from megatron_terapipe.search.machine.trainers import MEGATRON_LM, TERAPIPE
from megatron_terapipe.search.price.batch import StrategyBatch, batch_key
from megatron_terapipe.search.price.cost_model import CostModel, Prediction
from megatron_terapipe.search.price.efficiency import HardwareEfficiency
from megatron_terapipe.search.price.layer_times import LayerQuery, LayerTimes
from megatron_terapipe.search.price.workload import gpt_workload
from megatron_terapipe.strategy import Strategy
from tests.search.price.machines import A100, gpt

MODEL = gpt_workload(gpt(6, 256, 4, 128, 1024))
LINK = Link(bandwidth=1e12, latency_s=0)
FAST = Node(name="fast", device=A100, num_devices=1, inside=LINK, network=LINK)
SLOW = replace(FAST, name="slow", device=replace(A100, name="slow", half_flops=100e12))


class TwiceAsLong:
    """Op times that a test gives: a block takes 1 s forward, 2 s backward, and twice that on a slow device."""

    def __call__(self, query: LayerQuery) -> LayerTimes:
        block = float(query.layer.kind == "block") * (2.0 if query.device.name == "slow" else 1.0)
        time = block + np.zeros_like(query.start)
        return LayerTimes(time, time, time)


def in_pipeline_s(time: Prediction) -> float:
    """Seconds until the last backward."""
    parts = time.breakdown
    return parts.compute_s + parts.tensor_parallel_s + parts.bubble_s + parts.transfer_s


def pipelines(replicas: int, stages: int, micro_batches: int, schedule: str = "1f1b") -> Strategy:
    return Strategy(
        data_parallel_size=replicas,
        pipeline_parallel_size=stages,
        global_batch_size=replicas * micro_batches,
        schedule=schedule,
    )


def test_a_stage_that_is_slow_in_one_replica_does_not_hold_up_the_others() -> None:
    # Stages of 3 blocks: 9 s a micro-batch on a fast device, 18 s on a slow one. Four micro-batches pass the slow
    # stage, one the fast stage before or after it. If all replicas waited for the slowest, it would be 4 x 18 + 18.
    model = CostModel(MODEL, Cluster(nodes=(FAST, SLOW, SLOW, FAST)), software=MEGATRON_LM, op_times=TwiceAsLong())
    crossed = model.predict_time(pipelines(2, 2, 4))
    assert in_pipeline_s(crossed) == pytest.approx(4 * 18 + 9, abs=1e-3)
    # With the slow nodes in one replica, that replica is slow in both stages.
    apart = CostModel(MODEL, Cluster(nodes=(FAST, SLOW, FAST, SLOW)), software=MEGATRON_LM, op_times=TwiceAsLong())
    assert in_pipeline_s(apart.predict_time(pipelines(2, 2, 4))) == pytest.approx(4 * 18 + 18, abs=1e-3)


@pytest.mark.parametrize("software", [TERAPIPE, MEGATRON_LM], ids=["overlapped", "blocking"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble"])
def test_a_mixed_cluster_takes_the_time_of_its_slowest_replica(software: Software, schedule: str) -> None:
    """Nodes with one device do not share links, so that each replica can be priced as a cluster."""
    rng = random.Random(0)
    kinds = [
        FAST,
        replace(FAST, network=Link(bandwidth=2e9, latency_s=2e-4)),
        SLOW,
        replace(SLOW, network=Link(bandwidth=1e9, latency_s=1e-3)),
    ]
    unlike = 0
    for _ in range(12):
        replicas, stages, micro_batches = rng.choice((2, 3)), rng.choice((2, 3)), rng.choice((1, 4, 6))
        nodes = [rng.choice(kinds) for _ in range(replicas * stages)]
        whole = CostModel(MODEL, Cluster(nodes=tuple(nodes)), software=software)
        strategy = pipelines(replicas, stages, micro_batches, schedule)
        alone = []
        for replica in range(replicas):
            own = Cluster(nodes=tuple(nodes[replica::replicas]))
            model = CostModel(MODEL, own, software=software)
            alone.append(in_pipeline_s(model.predict_time(pipelines(1, stages, micro_batches, schedule))))
        assert in_pipeline_s(whole.predict_time(strategy)) == pytest.approx(max(alone), rel=1e-9)
        unlike += len(whole.groups(strategy).by_replica) > 1
    assert unlike > 6


def test_closed_forms_of_many_strategies_look_at_each_kind_of_replica() -> None:
    efficiency = HardwareEfficiency(iteration_s=0.0)
    strategy = pipelines(2, 2, 4)
    crossed, apart = (
        CostModel(MODEL, Cluster(nodes=nodes), software=MEGATRON_LM, efficiency=efficiency, op_times=TwiceAsLong())
        for nodes in ((FAST, SLOW, SLOW, FAST), (FAST, SLOW, FAST, SLOW))
    )
    # All stages have both devices: the two clusters differ only in replicas.
    assert batch_key(crossed, strategy) != batch_key(apart, strategy)
    for model, expected in ((crossed, 4 * 18 + 9), (apart, 4 * 18 + 18)):
        time = StrategyBatch.of([model], [strategy]).times(efficiency)
        assert time == pytest.approx([expected], abs=1e-3)
        assert time == pytest.approx([model.predict_time(strategy).iteration_time_s], rel=1e-3)
