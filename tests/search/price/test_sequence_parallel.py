"""Sequence-parallel ranks: shared work, head exchanges and memory."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_terapipe.search.price.cost_model import CostModel
from megatron_terapipe.search.price.efficiency import HardwareEfficiency
from megatron_terapipe.search.price.layer_times import LayerQuery
from megatron_terapipe.search.price.links import GroupTopology
from megatron_terapipe.search.price.memory import MemoryModel
from megatron_terapipe.search.price.stages import BACKWARD, FORWARD, head_exchange_s
from megatron_terapipe.search.price.workload import gpt_workload
from megatron_terapipe.strategy import Strategy
from tests.search.price.machines import A100, gpt, nodes

TOKENS, HEADS, KEYS, HEAD_SIZE = 8192, 16, 4, 128
GROUPED = gpt_workload(gpt(4, HEADS * HEAD_SIZE, HEADS, TOKENS, 1024, num_key_value_heads=KEYS))
BLOCK = GROUPED.layers[1]
FAST_HOST = HardwareEfficiency(launch_s=1e-9)
"""No op waits for its launches, which are as many however few rows there are."""
PERFECT = HardwareEfficiency(inside_efficiency=1.0, network_efficiency=1.0, collective_s=0.0)
INSIDE = GroupTopology(8, 1, 300e9, 0.0, 1.0, 0.0)


def query(sequence: int, tensor: int = 1, recompute: str = "none") -> LayerQuery:
    return LayerQuery(
        BLOCK,
        A100,
        tensor_parallel_size=tensor,
        sequence_parallel_size=sequence,
        micro_batch_size=2,
        start=0.0,
        end=float(TOKENS),
        recompute=recompute,
    )


def test_the_bytes_of_head_exchanges() -> None:
    """Two sequences of 8,192 tokens on 8 ranks: queries, keys and values of 1,024 tokens each go out, outputs back."""
    numbers_of_token = HEADS + 2 * 8 + HEADS  # four heads of keys are on two ranks each
    num_bytes = 2 * (2 * TOKENS / 8) * numbers_of_token * HEAD_SIZE
    assert num_bytes == 2 * 2048 * 48 * 128
    assert head_exchange_s(query(8), INSIDE, PERFECT, 2) == pytest.approx(7 / 8 * num_bytes / 300e9)
    # With two tensor-parallel ranks each has half of the heads, and no head of keys is copied among four ranks.
    halves = 2 * (2 * TOKENS / 4) * (HEADS + 2 * 4 + HEADS) / 2 * HEAD_SIZE
    four = INSIDE._replace(size=4)
    keys_fit = LayerQuery(
        BLOCK, A100, tensor_parallel_size=2, micro_batch_size=2, start=0.0, end=float(TOKENS), sequence_parallel_size=2
    )
    assert head_exchange_s(keys_fit, four._replace(size=2), PERFECT, 2) == pytest.approx(halves / 300e9)
    assert head_exchange_s(query(1), INSIDE._replace(size=1), PERFECT, 2) == 0


def strategy(**changes: object) -> Strategy:
    values = {"sequence_parallel_size": 8, "num_token_slices": 4, "global_batch_size": 1} | changes
    return Strategy(**values)  # type: ignore[arg-type]


def test_exchanges_are_repeated_with_the_forward() -> None:
    model = CostModel(GROUPED, nodes(1), efficiency=FAST_HOST)
    exchanged = {}
    for mode in ("none", "selective", "full", "stage"):
        exchanged[mode] = model.predict_time(strategy(recompute=mode)).breakdown.head_exchange_s
    assert exchanged["none"] == pytest.approx(exchanged["selective"])
    assert exchanged["full"] == pytest.approx(1.5 * exchanged["none"], rel=0.02)
    assert exchanged["stage"] == pytest.approx(exchanged["full"])
    assert model.predict_time(strategy(sequence_parallel_size=1)).breakdown.head_exchange_s == 0


@settings(max_examples=20, deadline=None)
@given(
    tensor=st.sampled_from([1, 2]),
    token_slices=st.sampled_from([1, 2, 8]),
    recompute=st.sampled_from(["none", "selective", "full", "stage"]),
    schedule=st.sampled_from(["1f1b", "zero-bubble"]),
)
def test_more_ranks_take_less_time_and_memory(tensor: int, token_slices: int, recompute: str, schedule: str) -> None:
    model, memory = CostModel(GROUPED, nodes(4), efficiency=FAST_HOST), MemoryModel(workload=GROUPED, cluster=nodes(4))
    times, kept = [], []
    for size in (1, 2, 4, 8):
        one = strategy(
            sequence_parallel_size=size,
            tensor_parallel_size=tensor,
            pipeline_parallel_size=2,
            num_token_slices=token_slices,
            recompute=recompute,
            schedule=schedule,
            global_batch_size=4,
        )
        time = model.predict_time(one).breakdown
        times.append(time.compute_s)
        held = memory.count(one)
        kept.append([each.activations + each.key_values + each.working for each in held])
    assert np.all(np.diff(times) < 0)
    assert np.all(np.diff(kept, axis=0) < 0)


def test_ranks_share_activations_but_copy_heads_of_keys() -> None:
    memory = MemoryModel(workload=GROUPED, cluster=nodes(1))

    def held(size: int) -> tuple[float, float, float]:
        (rank,) = memory.count(strategy(sequence_parallel_size=size, recompute="full"))
        return float(rank.activations), float(rank.key_values), float(rank.optimizer)

    one, four, eight = held(1), held(4), held(8)
    assert (four[0], eight[0]) == pytest.approx((one[0] / 4, one[0] / 8))
    assert (four[1], eight[1]) == pytest.approx((one[1] / 4, one[1] / 4))
    # Sequence-parallel ranks have the same weights: ZeRO 1 divides the optimizer among them.
    assert eight[2] == pytest.approx(one[2] / 8)


def test_the_head_runs_in_the_backward_of_a_recomputed_stage() -> None:
    model = CostModel(GROUPED, nodes(1))

    def ops(recompute: str) -> np.ndarray:
        placed = model.placed(strategy(recompute=recompute, sequence_parallel_size=1, pipeline_parallel_size=2))
        return model.stage_ops(placed)[:, :, 0]

    none, full, stage = ops("none"), ops("full"), ops("stage")
    assert stage[FORWARD, 0] == pytest.approx(none[FORWARD, 0])
    assert stage[FORWARD, 1] < none[FORWARD, 1]
    # All of the forward once more, but for the head's.
    assert (stage - none)[[FORWARD, BACKWARD]].sum(axis=0)[0] == pytest.approx(none[FORWARD, 0], rel=0.02)
    assert (stage - full)[[FORWARD, BACKWARD]].sum() == pytest.approx(0, abs=0.02 * none[FORWARD].sum())
