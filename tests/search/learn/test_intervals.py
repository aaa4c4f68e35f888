from dataclasses import replace

import numpy as np
import pytest

from megatron_terapipe.search.learn.calibration import (
    COVERAGE,
    NORMAL,
    Calibration,
    Intervals,
    calibrate,
    conformal,
    conformal_quantile,
    no_calibration,
    uncalibrated,
)
from megatron_terapipe.search.learn.fit import GroupEffects
from megatron_terapipe.search.machine.library import device
from megatron_terapipe.search.machine.trainers import MEGATRON_LM
from megatron_terapipe.search.price.batch import StrategyBatches
from megatron_terapipe.search.price.cost_model import CostModel
from megatron_terapipe.search.price.efficiency import HardwareEfficiency, Prior
from megatron_terapipe.strategy import Strategy
from tests.search.learn.synthetic import CLUSTER, STRATEGIES, WORKLOAD, measured


def test_a_quantile_holds_new_scores_as_often_as_it_says() -> None:
    random = np.random.default_rng(1)
    for size in (3, 8, 40):
        inside = []
        for _ in range(400):
            scores = np.abs(random.normal(size=size + 1))
            inside.append(scores[-1] <= conformal_quantile(scores[:-1], COVERAGE))
        # Never less than promised; with few scores more, for want of a better bound.
        assert np.mean(inside) > COVERAGE - 0.04
        assert size < 40 or np.mean(inside) < COVERAGE + 0.05


def test_a_strategy_unlike_those_measured_is_less_sure() -> None:
    intervals = Intervals(
        coverage=0.9, multiplier=2.0, residual_sd=0.1, covariance=np.diag([0.04, 0.0]), parameter_names=("a", "b")
    )
    alike, unlike = intervals.half_width(np.array([[0.0, 1.0], [1.0, 0.0]]))
    assert alike == pytest.approx(0.2)
    assert unlike == pytest.approx(2 * np.sqrt(0.01 + 0.04))
    low, high = intervals.interval_s(10.0, np.array([[0.0, 1.0]]))
    assert (low, high) == pytest.approx((10 / np.exp(0.2), 10 * np.exp(0.2)))


def test_intervals_of_a_calibration_hold_what_it_has_not_seen() -> None:
    true = HardwareEfficiency(launch_s=60e-6, inside_efficiency=0.5)
    trials = measured(efficiency=true, noise=0.05)
    calibration = calibrate(trials[::2])
    model = CostModel(WORKLOAD, CLUSTER, software=MEGATRON_LM, efficiency=calibration.efficiency, precision="fp16")
    unfitted = CostModel(WORKLOAD, CLUSTER, software=MEGATRON_LM, precision="fp16")

    def interval(found: Calibration, priced_by: CostModel, strategy: Strategy, time_s: float) -> tuple[float, float]:
        return found.intervals.interval_s(time_s, found.slopes(priced_by, [strategy]))

    inside = []
    for trial in trials[1::2]:
        assert trial.iteration_time_s is not None
        predicted = model.predict_time(trial.strategy).iteration_time_s
        low, high = interval(calibration, model, trial.strategy, predicted)
        assert low < predicted < high
        inside.append(low <= trial.iteration_time_s <= high)
        lowest, highest = interval(no_calibration(), unfitted, trial.strategy, predicted)
        assert lowest < low < high < highest
    assert np.mean(inside) >= 0.75  # of 14
    assert calibration.intervals.coverage == COVERAGE


def test_slopes_say_what_a_time_depends_on() -> None:
    model = CostModel(WORKLOAD, CLUSTER, software=MEGATRON_LM, precision="fp16")
    names = ("gemm_efficiency", "transfer_s", "iteration_s")
    slopes = StrategyBatches([model] * len(STRATEGIES), STRATEGIES).slopes(model.efficiency, names)
    assert slopes.shape == (len(STRATEGIES), 3)
    assert (slopes[:, 0] < 0).all() and (slopes[:, 2] > 0).all()
    alone = [strategy.pipeline_parallel_size == 1 for strategy in STRATEGIES]
    assert slopes[alone, 1] == pytest.approx(0.0)
    assert uncalibrated().half_width(np.zeros((1, len(uncalibrated().parameter_names))))[0] > 0.1


def test_intervals_are_wider_on_devices_that_no_table_is_of() -> None:
    model = CostModel(WORKLOAD, CLUSTER, software=MEGATRON_LM, precision="fp16")

    def half_width(name: str) -> float:
        nodes = tuple(replace(node, device=device(name)) for node in CLUSTER.nodes)
        found = no_calibration(replace(CLUSTER, nodes=nodes))
        return float(found.intervals.half_width(found.slopes(model, STRATEGIES[:1]))[0])

    assert half_width("A100") == half_width("H100") < half_width("V100") == half_width("T4")


def test_few_groups_that_agree_narrow_nothing() -> None:
    """Errors of a thousandth in each group: 4 groups cannot tell nine tenths, 40 can."""
    prior = Prior.of(HardwareEfficiency())

    def multiplier(num_groups: int) -> float:
        errors = np.random.default_rng(1).normal(scale=1e-3, size=2 * num_groups)
        groups = GroupEffects([index // 2 for index in range(2 * num_groups)])
        slopes = np.full((2 * num_groups, len(prior.names)), 0.1)
        return conformal(errors, slopes, groups, prior=prior, residual_sd=1e-3).multiplier

    assert multiplier(4) == NORMAL
    assert multiplier(40) < NORMAL / 4
