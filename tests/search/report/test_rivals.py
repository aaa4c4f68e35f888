"""A rival in words and as JSON, beside the winner of a ranking or alone."""

from dataclasses import replace

import pytest

from megatron_terapipe.search.answer.advice import RivalAdvice, compare_rival, rival_note, rival_part
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.machine.cluster_files import parse_cluster
from megatron_terapipe.search.price.cost_model import Pricing
from megatron_terapipe.search.price.workload_files import read_workload
from megatron_terapipe.search.rank.ranked import Ranked
from megatron_terapipe.search.rank.rivals import best_rival
from megatron_terapipe.strategy import Strategy

CLUSTER: Cluster = parse_cluster({"nodes": [{"machine": "dgx-h100", "count": 2}]}, "c.json")[0]
PRICING = Pricing(read_workload("llama3-8b", {"seq_length": 131072}), CLUSTER)


def advice(seconds: float | None = None, *, needs: float = 1.0) -> RivalAdvice:
    """Return the advice on a rival beside a winner of so many seconds, which needs so many times its memory."""
    rival = best_rival(PRICING, 1)
    assert rival is not None
    rival = replace(rival, memory=replace(rival.memory, working=needs * rival.memory.working))
    winner = None
    if seconds is not None:
        strategy = Strategy(
            data_parallel_size=1,
            tensor_parallel_size=8,
            pipeline_parallel_size=2,
            micro_batch_size=1,
            global_batch_size=1,
        )
        prediction = PRICING.predict(strategy)
        short = replace(prediction, iteration_time_s=seconds)
        winner = Ranked(rank=1, index=0, strategy=strategy, prediction=short, feasible=True)
    return compare_rival(rival, winner, PRICING.workload, CLUSTER)


def test_a_slower_rival_that_fits() -> None:
    found = advice(1.0)
    note = rival_note(found)
    assert note.startswith("ZeRO-3 with Ulysses over 16 ranks (DeepSpeed's ALST) would take ")
    assert f"(predicted), {found.time_ratio:.3g} times as long as rank 1; it fits, with " in note
    assert "without a pipeline" not in note


def test_a_faster_rival_is_advised() -> None:
    assert rival_note(advice(100.0)).endswith(": train this model without a pipeline")
    assert rival_note(advice()).endswith(": train this model without a pipeline")


def test_a_rival_that_does_not_fit() -> None:
    found = advice(1.0, needs=100.0)
    assert "; it does not fit, because it needs " in rival_note(found)
    assert str(rival_part(found).why_not) in rival_note(found)


def test_the_document_has_the_figures() -> None:
    found = advice(2.0)
    part = rival_part(found)
    assert part.why_not is None
    assert part.time_ratio == pytest.approx(part.iteration_time_s / 2)
    assert sum(part.breakdown.values()) == pytest.approx(part.iteration_time_s)
    assert part.mfu_causal is not None and 0.1 < part.mfu_causal < 0.5
