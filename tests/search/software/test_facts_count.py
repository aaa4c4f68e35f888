"""Every fact of a description that stands for itself changes a prediction: none is read in vain."""

from dataclasses import replace

import pytest

from megatron_terapipe.search.machine.software import Communication, Software
from megatron_terapipe.search.machine.terapipe import TERAPIPE
from megatron_terapipe.search.machine.trainers import SOFTWARE
from megatron_terapipe.search.price.cost_model import Pricing
from megatron_terapipe.strategy import Strategy
from tests.search.problems import small_problem

LAYOUT = Strategy(
    data_parallel_size=2,
    pipeline_parallel_size=2,
    tensor_parallel_size=1,
    zero_stage=1,
    recompute="selective",
    global_batch_size=8,
)
ON_TWO = replace(LAYOUT, data_parallel_size=1, tensor_parallel_size=2)


def priced(software: Software, strategy: Strategy) -> tuple[float, float]:
    problem = small_problem()
    prediction = Pricing(problem.workload, problem.cluster, software=software).predict(strategy)
    return prediction.iteration_time_s, prediction.peak_memory_bytes


@pytest.mark.parametrize(
    "changes",
    [
        {"launch_factor": 50.0},
        {"allocator_factor": 2.0},
        {"step_bytes": 180.0},
        {"bucket_elements": 1000},
        {"selective_recomputes": "attention"},
        {"residual_dropout": True},
        {"logits_at_once": 100},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_facts(changes: dict[str, object]) -> None:
    assert priced(replace(TERAPIPE, **changes), LAYOUT) != priced(TERAPIPE, LAYOUT)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "strategy"),
    [
        ({"overlaps_transfers": False}, LAYOUT),
        ({"overlaps_gradient_reduction": False}, LAYOUT),
        ({"overlaps_weight_gather": True}, LAYOUT),
        ({"reduction_bytes": 8}, LAYOUT),
        ({"shards_weights": True}, LAYOUT),
        ({"tensor_parallel_overlap": 0.5}, ON_TWO),
        ({"overlaps_transfers": False, "shares_transfers": True}, ON_TWO),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_communication(changes: dict[str, object], strategy: Strategy) -> None:
    def with_communication(changes: dict[str, object]) -> Software:
        communication: Communication = replace(TERAPIPE.communication, **changes)  # type: ignore[arg-type]
        return replace(TERAPIPE, communication=communication)

    without_last = dict(list(changes.items())[:-1])
    assert priced(with_communication(changes), strategy) != priced(with_communication(without_last), strategy)


def test_operators() -> None:
    costly = {
        name: replace(getattr(TERAPIPE.operators, name), forward=1e3)
        for name in ("layernorm", "residual", "activation", "heads", "loss", "embedding")
    }
    for name, operator in costly.items():
        changed = replace(TERAPIPE, operators=replace(TERAPIPE.operators, **{name: operator}))
        assert priced(changed, LAYOUT)[0] > priced(TERAPIPE, LAYOUT)[0], name


def test_trainers_differ() -> None:
    unsliced = replace(LAYOUT, recompute="none")
    assert len({priced(software, unsliced) for software in SOFTWARE.values()}) == len(SOFTWARE)
