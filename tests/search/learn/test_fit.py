"""HardwareEfficiency from measured runs."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from megatron_terapipe.search.learn.fit import FittedEfficiency, Sample, fit_efficiency
from megatron_terapipe.search.learn.trials import Trial
from megatron_terapipe.search.machine.trainers import MEGATRON_LM
from megatron_terapipe.search.price.cost_model import CostModel
from megatron_terapipe.search.price.efficiency import HardwareEfficiency, Prior, is_factor
from megatron_terapipe.strategy import Strategy
from tests.search.cost.machines import GPT, nodes, strategy

PRIOR = Prior.of(HardwareEfficiency())
CLUSTER = nodes(2)
TRUTH = HardwareEfficiency(
    gemm_efficiency=0.6, memory_efficiency=0.6, network_efficiency=0.3, inside_efficiency=0.5, launch_s=60e-6
)
LAYOUTS = [(16, 1, 1), (8, 2, 1), (4, 4, 1), (2, 8, 1), (4, 2, 2), (2, 2, 4), (4, 1, 4), (1, 16, 1), (1, 4, 4)]


def strategies(sizes: Sequence[int] = (1, 4)) -> list[Strategy]:
    return [
        strategy(
            data_parallel_size=dp,
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            micro_batch_size=size,
            global_batch_size=128,
        )
        for dp, tp, pp in LAYOUTS
        for size in sizes
    ]


def measured(one: Strategy, seconds: float | None, **changes: object) -> Trial:
    values: dict[str, object] = {
        "source": "test",
        "id": "",
        "group": "one",
        "workload": GPT,
        "cluster": CLUSTER,
        "strategy": one,
        "software": MEGATRON_LM,
        "precision": "bf16",
        "iteration_time_s": seconds,
        "peak_memory_bytes": None,
        "out_of_memory": None,
    }
    return Trial(**(values | changes))  # type: ignore[arg-type]


def trials(noise: float = 0.01, sizes: Sequence[int] = (1, 4)) -> list[Trial]:
    model = CostModel(GPT, CLUSTER, software=MEGATRON_LM, efficiency=TRUTH)
    draw = np.random.default_rng(0)
    return [
        measured(one, model.predict_time(one).iteration_time_s * float(np.exp(noise * draw.normal())), group=str(index))
        for index, one in enumerate(strategies(sizes))
    ]


def errors(efficiency: HardwareEfficiency) -> np.ndarray:
    """Relative errors on other strategies than those that were measured."""
    truth = CostModel(GPT, CLUSTER, software=MEGATRON_LM, efficiency=TRUTH)
    guess = truth.with_efficiency(efficiency)
    others = strategies((8,))
    ratio = [guess.predict_time(one).iteration_time_s / truth.predict_time(one).iteration_time_s for one in others]
    return np.abs(np.array(ratio) - 1)


@pytest.fixture(scope="module")
def fitted() -> FittedEfficiency:
    return fit_efficiency(Sample(trials(sizes=(1, 2, 4))))


def test_strategies_that_nobody_measured_are_predicted(fitted: FittedEfficiency) -> None:
    assert errors(HardwareEfficiency()).mean() > 0.15
    assert errors(fitted.efficiency).mean() < 0.03
    assert 0.005 < fitted.residual_sd < 0.025


def test_constants_are_found_and_are_surer_than_before(fitted: FittedEfficiency) -> None:
    deviations = np.sqrt(np.diag(fitted.covariance))
    # Those of another group than the trials' are a little further off than those of the cluster.
    assert (deviations <= PRIOR.widths * (1 + 1e-9) * np.hypot(1, fitted.groups.share)).all()
    shares = [name for name in PRIOR.names if name.endswith("efficiency") or name == "launch_exposed"]
    assert len(shares) == 9 and all(getattr(fitted.efficiency, name) <= 1 + 1e-6 for name in shares)
    assert fitted.efficiency.network_efficiency == pytest.approx(TRUTH.network_efficiency, rel=0.1)
    # Constants that do much the same are told apart as well as the covariance says.
    for name, deviation in zip(PRIOR.names, deviations, strict=True):
        if is_factor(name):
            continue
        assert abs(np.log(getattr(fitted.efficiency, name) / getattr(TRUTH, name))) < 3 * deviation, name


def test_eight_trials_already_help() -> None:
    few = fit_efficiency(Sample(trials()[::2][:8]))
    assert errors(few.efficiency).mean() < 0.4 * errors(HardwareEfficiency()).mean()


def test_one_failed_measurement_does_not_spoil_the_rest() -> None:
    spoilt = trials()
    spoilt[5] = replace(spoilt[5], iteration_time_s=5 * (spoilt[5].iteration_time_s or 1.0))
    assert errors(fit_efficiency(Sample(spoilt)).efficiency).mean() < 0.05


def test_a_run_that_was_cut_off_is_a_lower_bound() -> None:
    known = trials(sizes=(2,))
    slow = strategies((1,))[0]
    time = CostModel(GPT, CLUSTER, software=MEGATRON_LM).predict_time(slow).iteration_time_s
    harmless = measured(slow, None, longer_than_s=0.1 * time)
    assert fit_efficiency(Sample([harmless])).efficiency == HardwareEfficiency()
    telling = measured(slow, None, longer_than_s=1.5 * time)
    assert (
        CostModel(GPT, CLUSTER, software=MEGATRON_LM, efficiency=fit_efficiency(Sample([telling])).efficiency)
        .predict_time(slow)
        .iteration_time_s
        > 1.2 * time
    )
    failed = measured(slow, None)
    assert len(Sample([*known, failed])) == len(known)


def test_without_trials_it_is_what_was_known_before() -> None:
    nothing = fit_efficiency(Sample([]))
    assert nothing.efficiency == HardwareEfficiency()
    assert np.sqrt(np.diag(nothing.covariance)) == pytest.approx(PRIOR.widths)


def test_trials_of_equal_models_share_what_is_computed() -> None:
    sample = Sample(trials())
    assert len({id(model) for model in sample.models}) == 1
    assert sample.simulated_ratio(TRUTH) == pytest.approx(1, abs=0.1)
