"""Replicas of a pipeline on unlike nodes: each is a pipeline of its own, and the slowest ends the iteration."""

import random
from dataclasses import replace

import numpy as np
import pytest

from megatron_terapipe.search.machine.cluster import Cluster, Link, Node
from megatron_terapipe.search.machine.software import Software
from megatron_terapipe.search.machine.trainers import MEGATRON_LM, TERAPIPE
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


@pytest.mark.parametrize(
    ("nodes", "makespan"),
    [
        # Stages of 3 blocks: 9 s a micro-batch on a fast device, 18 s on a slow one. Four micro-batches pass the slow
        # stage, one the fast stage before or after it. If all replicas waited for the slowest, it would be 5 x 18.
        ((FAST, SLOW, SLOW, FAST), 4 * 18 + 9),
        # With the slow nodes in one replica, that replica is slow in both stages.
        ((FAST, SLOW, FAST, SLOW), 4 * 18 + 18),
    ],
)
def test_a_stage_that_is_slow_in_one_replica_does_not_hold_up_the_others(
    nodes: tuple[Node, ...], makespan: float
) -> None:
    efficiency, strategy = HardwareEfficiency(iteration_s=0.0), pipelines(2, 2, 4)
    cluster = Cluster(nodes=nodes)
    model = CostModel(MODEL, cluster, software=MEGATRON_LM, efficiency=efficiency, op_times=TwiceAsLong())
    assert in_pipeline_s(model.predict_time(strategy)) == pytest.approx(makespan, abs=1e-3)
    assert model.closed_form_s(strategy) == pytest.approx([makespan], abs=1e-3)


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
