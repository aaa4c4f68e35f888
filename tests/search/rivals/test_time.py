"""Seconds of ZeRO 3 with Ulysses follow from those of layers and links."""

from dataclasses import replace

import pytest

from megatron_terapipe.search.machine.trainers import ALST
from megatron_terapipe.search.price.cost_model import CostModel
from megatron_terapipe.search.price.layer_times import LayerQuery
from megatron_terapipe.search.price.roofline import Roofline
from megatron_terapipe.search.price.workload import Workload
from megatron_terapipe.search.rank.rivals import RivalSettings, RivalTimes, parts
from tests.search.problems import small_cluster, small_problem

ONE = RivalSettings(
    sequence_parallel_size=1,
    data_parallel_size=1,
    micro_batch_size=1,
    num_micro_batches=1,
    offloads_checkpoints=False,
    offloads_optimizer=False,
    offloads_weights=False,
)


@pytest.fixture(scope="module")
def model() -> CostModel:
    return CostModel(workload(), small_cluster(2, num_devices=4))


def workload() -> Workload:
    return small_problem(seq_length=65536, hidden_size=1024).workload


def test_the_parts_of_a_block_are_the_block(model: CostModel) -> None:
    block = model.workload.layers[1]
    op_times = Roofline(model.efficiency, ALST)
    device = model.cluster.nodes[0].device

    def forward(layer: object) -> float:
        query = LayerQuery(
            layer,  # type: ignore[arg-type]
            device,
            tensor_parallel_size=1.0,
            micro_batch_size=1.0,
            start=0.0,
            end=float(block.tokens),
        )
        return float(op_times(query).forward)

    attention, mlp = parts(block)
    assert mlp is not None
    assert forward(attention) + forward(mlp) == pytest.approx(forward(block), rel=0.01)


def test_ranks_divide_the_work(model: CostModel) -> None:
    times = RivalTimes(model)
    alone, shared = times.price(ONE), times.price(replace(ONE, sequence_parallel_size=8))
    assert alone.exchange_s == 0 < shared.exchange_s
    # Gradients of weights are added up on every rank, whatever its tokens.
    assert alone.compute_s / 8 < shared.compute_s < 1.2 * alone.compute_s / 8
    assert alone.total_s == pytest.approx(alone.compute_s, rel=0.02)


def test_a_longer_sequence_takes_longer_and_four_times_in_attention() -> None:
    cluster = small_cluster(1, num_devices=4)
    short, long = (small_problem(seq_length=length, hidden_size=1024).workload for length in (2**20, 2**21))
    four = replace(ONE, sequence_parallel_size=4)
    ratio = (
        RivalTimes(CostModel(long, cluster)).price(four).total_s
        / RivalTimes(CostModel(short, cluster)).price(four).total_s
    )
    assert 3.8 < ratio < 4


def test_what_goes_to_the_host_takes_time(model: CostModel) -> None:
    times = RivalTimes(model)
    kept = times.price(replace(ONE, sequence_parallel_size=4))
    offloaded = times.price(
        replace(
            ONE, sequence_parallel_size=4, offloads_checkpoints=True, offloads_optimizer=True, offloads_weights=True
        )
    )
    assert kept.copy_s == 0 < offloaded.copy_s
    assert kept.optimizer_s < offloaded.optimizer_s
    assert kept.gather_s < offloaded.gather_s
    assert kept.compute_s == offloaded.compute_s


def test_exchanges_over_the_network_take_longer(model: CostModel) -> None:
    times = RivalTimes(model)
    inside = times.price(replace(ONE, sequence_parallel_size=4))
    across = times.price(replace(ONE, sequence_parallel_size=8))
    # Half of the bytes of four ranks leave over one card; inside, three quarters of those of one rank over its link.
    assert across.exchange_s > 4 * inside.exchange_s
