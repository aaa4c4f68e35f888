"""Constants of time from measured runs, and the groups that runs fall into."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from megatron_terapipe.search.learn.fit import OFFSETS, Fitted, GroupEffects, Sample, fit
from megatron_terapipe.search.learn.priors import Prior
from megatron_terapipe.search.learn.trials import Trial
from megatron_terapipe.search.price.efficiency import HardwareEfficiency
from megatron_terapipe.strategy import Strategy
from tests.search.learn.synthetic import measured, model_with, trial
from tests.search.price.machines import strategy

PRIOR = Prior.of(HardwareEfficiency())
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


def trials(sizes: Sequence[int] = (1, 4)) -> list[Trial]:
    return measured(strategies(sizes), efficiency=TRUTH, noise=0.01)


def errors(efficiency: HardwareEfficiency) -> np.ndarray:
    """Relative errors on other strategies than those that were measured."""
    truth, guess = model_with(TRUTH), model_with(efficiency)
    others = strategies((8,))
    ratio = [guess.predict_time(one).iteration_time_s / truth.predict_time(one).iteration_time_s for one in others]
    return np.abs(np.array(ratio) - 1)


@pytest.fixture(scope="module")
def sample() -> Sample:
    return Sample(trials(sizes=(1, 2, 4)))


@pytest.fixture(scope="module")
def fitted(sample: Sample) -> Fitted:
    return fit(sample, PRIOR)


def test_strategies_without_trials_are_predicted(fitted: Fitted) -> None:
    assert errors(HardwareEfficiency()).mean() > 0.15
    assert errors(fitted.constants).mean() < 0.03
    assert 0.005 < fitted.residual_sd < 0.025


def test_constants_are_found_with_less_uncertainty(sample: Sample, fitted: Fitted) -> None:
    slopes = sample.slopes(fitted.constants, PRIOR.names)
    variances = np.full(len(sample), fitted.residual_sd**2)
    deviations = np.sqrt(np.diag(fitted.groups.covariance(slopes, variances, PRIOR.widths)))
    # Those of another group than the trials' are a little further off than those of the cluster.
    assert (deviations <= PRIOR.widths * (1 + 1e-9) * np.hypot(1, fitted.groups.share)).all()
    shares = [name for name in PRIOR.names if name.endswith("efficiency") or name == "launch_exposed"]
    assert len(shares) == 9 and all(getattr(fitted.constants, name) <= 1 + 1e-6 for name in shares)
    assert fitted.constants.network_efficiency == pytest.approx(TRUTH.network_efficiency, rel=0.1)
    # Constants that do much the same are told apart as well as the covariance says.
    for name, deviation in zip(PRIOR.names, deviations, strict=True):
        if name.endswith("]"):
            continue
        assert abs(np.log(getattr(fitted.constants, name) / getattr(TRUTH, name))) < 3 * deviation, name


def test_one_failed_measurement_does_not_spoil_the_rest() -> None:
    spoilt = trials()
    spoilt[5] = replace(spoilt[5], iteration_time_s=5 * (spoilt[5].iteration_time_s or 1.0))
    assert errors(fit(Sample(spoilt), PRIOR).constants).mean() < 0.05


def test_a_run_that_was_cut_off_is_a_lower_bound() -> None:
    known = trials(sizes=(2,))
    slow = strategies((1,))[0]
    time = model_with().predict_time(slow).iteration_time_s
    harmless, telling = (trial(slow, None, longer_than_s=factor * time) for factor in (0.1, 1.5))
    assert fit(Sample([harmless]), PRIOR).constants == HardwareEfficiency()
    fitted = fit(Sample([telling]), PRIOR).constants
    assert model_with(fitted).predict_time(slow).iteration_time_s > 1.2 * time
    failed = trial(slow, None)
    assert len(Sample([*known, failed])) == len(known)


RANDOM = np.random.default_rng(0)
SLOPES, WIDTHS, SHARE = RANDOM.normal(size=(12, 3)), np.array([0.5, 0.2, 1.0]), 0.3
SD, OFFSET = 0.1, 0.15
OBSERVED = SLOPES @ np.array([0.3, -0.2, 0.1]) + RANDOM.normal(0, SD, 12)
GROUPS = [index // 3 for index in range(12)]
VARIANCES = np.full(12, SD**2) * np.linspace(1, 2, 12)


def solve(rows: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Constants and their covariance, the groups' own constants written out as more unknowns."""
    unknown = np.zeros((len(rows), 3 * 5 + 4))
    unknown[:, :3] = SLOPES[rows]
    for line, row in enumerate(rows):
        unknown[line, 3 * (1 + GROUPS[row]) : 3 * (2 + GROUPS[row])] = SLOPES[row]
        unknown[line, 3 * 5 + GROUPS[row]] = 1.0
    widths = np.concatenate([WIDTHS, *4 * [SHARE * WIDTHS], 4 * [OFFSET]])
    precision = (unknown.T / VARIANCES[rows]) @ unknown + np.diag(widths**-2)
    covariance = np.linalg.inv(precision)
    return (covariance @ (unknown.T / VARIANCES[rows]) @ OBSERVED[rows])[:3], covariance[:3, :3]


def test_unseen_groups_are_predicted_as_by_another_fit() -> None:
    everything = list(range(12))
    errors = OBSERVED - SLOPES @ solve(everything)[0]
    unseen_errors, variances = GroupEffects(GROUPS, SHARE, OFFSET).unseen(errors, SLOPES, VARIANCES, WIDTHS)
    for group in range(4):
        rows = [index for index in everything if GROUPS[index] == group]
        found, covariance = solve([index for index in everything if GROUPS[index] != group])
        assert unseen_errors[rows] == pytest.approx(OBSERVED[rows] - SLOPES[rows] @ found)
        of_another = covariance + np.diag((SHARE * WIDTHS) ** 2)
        assert variances[rows] == pytest.approx(np.diag(SLOPES[rows] @ of_another @ SLOPES[rows].T) + OFFSET**2)


def test_precision_and_whitening_agree() -> None:
    groups = GroupEffects(GROUPS, SHARE, OFFSET)
    white = groups.whitening(SLOPES, VARIANCES, WIDTHS) @ SLOPES
    precision = groups.precision(SLOPES, VARIANCES, WIDTHS)
    assert white.T @ white + np.diag(WIDTHS**-2) == pytest.approx(precision)
    assert np.linalg.inv(precision) == pytest.approx(solve(list(range(12)))[1])


def test_the_evidence_is_that_of_a_normal_distribution() -> None:
    groups = GroupEffects(GROUPS, SHARE, OFFSET)
    same = np.equal.outer(GROUPS, GROUPS)
    shared = same * (OFFSET**2 + (SLOPES * (SHARE * WIDTHS) ** 2) @ SLOPES.T)
    whole = np.diag(VARIANCES) + shared + (SLOPES * WIDTHS**2) @ SLOPES.T
    expected = -0.5 * (OBSERVED @ np.linalg.solve(whole, OBSERVED) + np.linalg.slogdet(whole)[1])
    # All but the widths of the prior, which stay the same.
    constant = np.sum(np.log(WIDTHS))
    assert groups.log_evidence(OBSERVED, SLOPES, VARIANCES, WIDTHS) == pytest.approx(expected + constant)


def test_groups_that_differ_are_found_to_differ() -> None:
    draw = np.random.default_rng(1)
    groups = np.repeat(np.arange(40), 3)
    slopes, noise = np.ones((120, 1)), draw.normal(0, 0.01, 120)
    apart = GroupEffects(groups.tolist()).most_probable(
        noise + 0.1 * draw.normal(size=40)[groups], slopes, np.full(120, 1e-4), np.array([0.01])
    )
    alike = GroupEffects(groups.tolist()).most_probable(noise, slopes, np.full(120, 1e-4), np.array([0.01]))
    assert apart.offset == max(OFFSETS) and alike.offset == min(OFFSETS)
