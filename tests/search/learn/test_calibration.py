"""Intervals, constants of memory, the choice of trials, and the calibration of each cluster."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.learn.calibration import (
    COVERAGE,
    INSIDE,
    NETWORK,
    NORMAL,
    Calibration,
    Intervals,
    MemorySample,
    calibrate,
    conformal,
    conformal_quantile,
    fit_memory,
    no_calibration,
)
from megatron_terapipe.search.learn.cluster_calibrations import (
    Calibrations,
    calibrated,
    propose,
    propose_strategies,
    read_calibrations,
    write_calibrations,
)
from megatron_terapipe.search.learn.fit import GroupEffects
from megatron_terapipe.search.learn.priors import Prior
from megatron_terapipe.search.machine import library
from megatron_terapipe.search.machine.cluster import Cluster, Link, Node
from megatron_terapipe.search.machine.library import device
from megatron_terapipe.search.price.cost_model import CostModel
from megatron_terapipe.search.price.efficiency import HardwareEfficiency
from megatron_terapipe.search.price.memory import MemoryOverheads
from megatron_terapipe.strategy import Strategy
from tests.search.learn.synthetic import CLUSTER, STRATEGIES, a100s, failed, measured, model_with

SLOW = HardwareEfficiency(gemm_efficiency=0.6, launch_s=60e-6, inside_efficiency=0.5)


def test_quantile_has_its_coverage() -> None:
    random = np.random.default_rng(1)
    for size in (3, 8, 40):
        inside = []
        for _ in range(400):
            scores = np.abs(random.normal(size=size + 1))
            inside.append(scores[-1] <= conformal_quantile(scores[:-1], COVERAGE))
        # Never less than stated; with few scores more.
        assert np.mean(inside) > COVERAGE - 0.04
        assert size < 40 or np.mean(inside) < COVERAGE + 0.05


def test_intervals_widen_with_distance_from_the_trials() -> None:
    intervals = Intervals(
        coverage=0.9,
        multiplier=2.0,
        residual_sd=0.1,
        covariance=np.diag([0.04, 0.0]),
        parameter_names=("launch_s", "iteration_s"),
    )
    alike, unlike = intervals.half_width(np.array([[0.0, 1.0], [1.0, 0.0]]))
    assert alike == pytest.approx(0.2)
    assert unlike == pytest.approx(2 * np.sqrt(0.01 + 0.04))


def test_intervals_contain_unseen_trials() -> None:
    trials = measured(efficiency=SLOW, noise=0.05)
    calibration = calibrate(trials[::2])
    assert calibration.notes == ()
    model = model_with(calibration.efficiency)
    unfitted = model_with()

    def interval(found: Calibration, priced_by: CostModel, strategy: Strategy, time_s: float) -> tuple[float, float]:
        return found.intervals_s(priced_by, [strategy], [time_s])[0]

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


def test_intervals_are_wider_on_devices_that_no_table_is_of() -> None:
    model = model_with()

    def half_width(name: str) -> float:
        nodes = tuple(replace(node, device=device(name)) for node in CLUSTER.nodes)
        found = no_calibration(replace(CLUSTER, nodes=nodes))
        return float(found.intervals.half_width(found.slopes(model, STRATEGIES[:1]))[0])

    assert half_width("A100") == half_width("H100") < half_width("V100") == half_width("T4")


def test_few_groups_do_not_narrow_intervals() -> None:
    """Errors of a thousandth in each group: 4 groups do not determine nine tenths, 40 do."""
    prior = Prior.of(HardwareEfficiency())

    def multiplier(num_groups: int) -> float:
        errors = np.random.default_rng(1).normal(scale=1e-3, size=2 * num_groups)
        groups = GroupEffects([index // 2 for index in range(2 * num_groups)])
        slopes = np.full((2 * num_groups, len(prior.names)), 0.1)
        return conformal(errors, slopes, groups, prior=prior, residual_sd=1e-3).multiplier

    assert NORMAL < multiplier(4) < 2.1
    assert multiplier(40) < NORMAL / 4


TRUE = MemoryOverheads(framework_bytes=6e9, communicator_bytes=0.4e9, state_factor=1.05, activation_factor=1.15)


def test_constants_of_another_cluster_are_found() -> None:
    trials = measured(memory_overheads=TRUE)
    seen, unseen = trials[::2], MemorySample(trials[1::2])
    before = np.abs(unseen.errors(MemoryOverheads())).mean()
    overheads, num_trials = fit_memory(seen)
    assert overheads is not None
    assert np.abs(unseen.errors(overheads)).mean() < 0.02 < 0.05 < before
    assert overheads.framework_bytes == pytest.approx(TRUE.framework_bytes, rel=0.2)
    assert num_trials == len(seen)


def test_runs_without_a_peak_are_bounds() -> None:
    known = measured(memory_overheads=MemoryOverheads(framework_bytes=6e9, activation_factor=1.4))
    most = float(np.median([one.peak_memory_bytes or 0 for one in known]))
    small = replace(CLUSTER.nodes[0].device, memory_bytes=most)
    cluster = Cluster(nodes=tuple(replace(node, device=small) for node in CLUSTER.nodes))
    trials = [
        replace(failed(one) if (one.peak_memory_bytes or 0) > most else one, cluster=cluster, peak_memory_bytes=None)
        for one in known
    ]
    sample = MemorySample(trials)
    ran = ~sample.failed
    assert ran.sum() == len(sample) / 2
    for overheads, wrong in ((MemoryOverheads(), sample.failed), (MemoryOverheads(framework_bytes=9e9), ran)):
        errors = sample.errors(overheads)
        assert (errors[sample.failed] <= 0).all() and (errors[ran] >= 0).all() and (errors[wrong] != 0).any()
    fitted, num_trials = fit_memory(trials)
    assert fitted is not None and num_trials == len(trials)
    assert np.abs(sample.errors(fitted)).max() < 0.03 < 0.1 < np.abs(sample.errors(MemoryOverheads())).max()
    # Bounds on one side leave the defaults.
    for alike in (sample.failed, ran):
        assert fit_memory([one for one, used in zip(trials, alike, strict=True) if used]) == (None, 0)


SPREAD = 0.05


def variance_left(slopes: np.ndarray, covariance: np.ndarray, chosen: list[int]) -> float:
    precision = slopes[chosen].T @ slopes[chosen] / SPREAD**2 + np.linalg.inv(covariance)
    return float(np.einsum("np,pq,nq->n", slopes, np.linalg.inv(precision), slopes).mean())


def test_chosen_trials_beat_random_ones() -> None:
    random = np.random.default_rng(1)
    slopes = random.normal(size=(60, 8)) * np.array([3, 1, 1, 0.3, 0.3, 0.1, 0.1, 0.1])
    covariance = np.eye(8)
    chosen = propose(slopes, covariance, SPREAD, 8, misfit_share=0.0)
    assert len(set(chosen)) == 8
    others = [variance_left(slopes, covariance, list(random.choice(60, 8, replace=False))) for _ in range(50)]
    assert variance_left(slopes, covariance, chosen) < np.quantile(others, 0.1)


def test_strategies() -> None:
    model = model_with()
    chosen = propose_strategies(model, STRATEGIES, no_calibration(), 4)
    assert len(chosen) == 4 and all(strategy in STRATEGIES for strategy in chosen)
    # Layouts that differ, since each shows other links and sizes of products.
    assert len({(one.tensor_parallel_size, one.pipeline_parallel_size) for one in chosen}) >= 3
    assert len(propose_strategies(model, STRATEGIES[:2], no_calibration(), 5)) == 2


DEVICE = CLUSTER.nodes[0].device.name


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return calibrate(measured(STRATEGIES[:4], noise=0.05, efficiency=SLOW))


def written(tmp_path: Path, *calibrations: Calibration) -> str:
    path = str(tmp_path / "c.json")
    write_calibrations(path, calibrations)
    return path


def test_calibration_files_round_trip(tmp_path: Path, calibration: Calibration) -> None:
    (again,) = read_calibrations(written(tmp_path, calibration))
    assert again.efficiency == calibration.efficiency and again.memory_overheads == calibration.memory_overheads
    assert (again.source, again.device, again.num_trials) == ("synthetic", DEVICE, 4)
    slopes = np.ones((1, len(calibration.intervals.parameter_names)))
    assert again.intervals.half_width(slopes) == pytest.approx(calibration.intervals.half_width(slopes))
    assert calibrated(CLUSTER, str(tmp_path / "c.json")).efficiency == calibration.efficiency


@pytest.mark.parametrize(
    ("intervals", "changes", "said"),
    [
        ({}, {"format": "other"}, "format"),
        ({}, {"version": 9}, "version 9 is not 3"),
        ({}, {"calibrations": []}, "calibrations [] is an empty list"),
        ({}, {"calibrations": [{"source": "s"}]}, "calibrations[0].device is missing"),
        ({"covariance": [[1]]}, {}, "has a covariance that is not a table of"),
        ({"parameter_names": ["warp"]}, {}, 'parameter_names[0] "warp" is not known'),
    ],
)
def test_errors(
    tmp_path: Path, calibration: Calibration, intervals: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    path = Path(written(tmp_path, calibration))
    document = json.loads(path.read_text())
    document["calibrations"][0]["intervals"].update(intervals)
    path.write_text(json.dumps(document | changes))
    with pytest.raises(ConfigError) as error:
        read_calibrations(str(path))
    assert str(path) in str(error.value) and said in str(error.value)


def a_width(calibration: Calibration, strategy: Strategy) -> float:
    model = model_with(calibration.efficiency)
    ((low, high),) = calibration.intervals_s(model, [strategy], [1.0])
    return float(np.log(high / low))


def test_intervals_are_wider_for_kinds_without_trials() -> None:
    """Many trials of one hidden size and recomputation are one group for the others."""
    trials = [one for one in measured(noise=0.01, efficiency=SLOW) if one.strategy.recompute == "none"]
    alone = calibrate([replace(one, group=str(index)) for index, one in enumerate(trials)])
    assert alone.kinds == ("hidden size 2048, recompute none",) and alone.other_kinds is not None
    known, other = (replace(STRATEGIES[0], recompute=recompute) for recompute in ("none", "full"))
    assert a_width(alone, other) > 3 * a_width(alone, known) > 0
    assert a_width(alone.model_copy(update={"other_kinds": None, "kinds": ()}), other) < a_width(alone, other)


def test_a_fit_that_does_not_help_other_groups_is_not_used() -> None:
    """Half of the groups are slower than predicted and half faster, for no reason that a constant has."""
    signs = np.random.default_rng(3).permutation(np.repeat([-0.1, 0.1], 7))
    trials = measured(memory_overheads=TRUE)
    for index, one in enumerate(trials):
        object.__setattr__(one, "iteration_time_s", (one.iteration_time_s or 0) * float(np.exp(signs[index // 2])))
    found = calibrate(trials)
    assert (found.efficiency, found.num_trials) == (None, len(trials)) and found.memory_overheads is not None
    assert "28 trials of synthetic are not used: fits without a group predict it no better" in found.notes[0]
    # 14 groups show how far the defaults are off.
    assert 0.2 < a_width(found, STRATEGIES[0]) < a_width(no_calibration(CLUSTER), STRATEGIES[0])


@pytest.mark.parametrize(
    ("changes", "reset", "said"),
    [
        ({}, (), ""),
        ({"network": Link(bandwidth=26e9, latency_s=1e-6)}, (), ""),
        ({"num_network_cards": 1}, NETWORK, "ran on 100 GB/s of nodes to the network, and this cluster has 25 GB/s: "),
        ({"network": Link(bandwidth=50e9, latency_s=5e-6)}, NETWORK, "this cluster has 200 GB/s"),
        (
            {"inside": Link(bandwidth=32e9, latency_s=5e-6)},
            INSIDE,
            "ran on 300 GB/s inside nodes, and this cluster has 32",
        ),
    ],
)
def test_a_calibration_on_other_links(
    tmp_path: Path, calibration: Calibration, changes: dict[str, Any], reset: tuple[str, ...], said: str
) -> None:
    moved = replace(calibration.efficiency or HardwareEfficiency(), network_efficiency=0.1, inside_efficiency=0.3)
    path = written(tmp_path, calibration.model_copy(update={"efficiency": moved}))
    found = calibrated(Cluster(nodes=tuple(replace(node, **changes) for node in CLUSTER.nodes)), path)
    assert found.efficiency is not None and len(found.notes) == bool(reset) and said in "".join(found.notes)
    for each in fields(HardwareEfficiency):
        expected = HardwareEfficiency() if each.name in reset else moved
        assert getattr(found.efficiency, each.name) == getattr(expected, each.name), each.name
    slopes = np.array([[float(name in reset[:1]) for name in calibration.intervals.parameter_names]])
    widths = [float(each.intervals.half_width(slopes)[0]) for each in (calibration, found)]
    # The four trials have no tensor-parallel ranks: they leave links inside nodes as unsure as the prior.
    assert widths[0] < 0.9 * widths[1] if reset == NETWORK else widths[0] == pytest.approx(widths[1])
    assert calibrated(a100s(1), path).efficiency is None  # trials on several nodes say little of one
    document = json.loads(Path(path).read_text())
    for name in ("kinds", "inside_bandwidths", "network_bandwidths", "notes"):
        del document["calibrations"][0][name]
    Path(path).write_text(json.dumps(document))
    (note,) = calibrated(CLUSTER, path).notes
    assert note.startswith("the links that the trials ran on are not recorded")


def test_a_calibration_of_other_devices(tmp_path: Path, calibration: Calibration) -> None:
    path = written(tmp_path, calibration)
    link = Link(bandwidth=1e10, latency_s=1e-6)
    other = Cluster(
        nodes=(Node(name="n", device=library.device("V100-16GB"), num_devices=1, inside=link, network=link),)
    )
    with pytest.raises(ConfigError, match=f"no calibration of V100.*it is of {DEVICE}"):
        calibrated(other, path)


def test_each_cluster_has_its_own() -> None:
    first, second = measured(STRATEGIES[:3]), measured(STRATEGIES[:2], source="another")
    told: list[str] = []
    calibrations = Calibrations([*first, *second], progress=told.append)
    assert calibrations.of("synthetic", DEVICE, True).num_trials == 3
    assert calibrations.of("another", DEVICE, True).num_trials == 2
    # What nobody measured keeps the defaults; a trial without a source may be of any cluster with such devices.
    assert (
        calibrations.of("a third", DEVICE, True).num_trials == calibrations.of("synthetic", "T4", True).num_trials == 0
    )
    assert calibrations.of("", DEVICE, True).num_trials == 5
    assert [one.num_trials for one in calibrations.fitted()] == [3, 2]
    assert len(told) == 3  # each is fitted once


def test_one_node_and_several_are_calibrated_apart() -> None:
    several, one = measured(STRATEGIES[:8]), measured(STRATEGIES[:9])
    for trial in one:
        half = replace(trial.strategy, data_parallel_size=trial.strategy.data_parallel_size // 2)
        object.__setattr__(trial, "cluster", a100s(1))
        object.__setattr__(trial, "strategy", half)
    calibrations = Calibrations([*several, *one])
    assert calibrations.of("synthetic", DEVICE, True).num_trials == 8
    assert calibrations.of("synthetic", DEVICE, False).num_trials == 9
    assert [found.several_nodes for found in calibrations.fitted()] == [True, False]
    # Memory knows no nodes; times of several nodes do not follow from those of one, and the user is told so.
    assert calibrations.of("synthetic", DEVICE, True).num_memory_trials == 17
    of_one = Calibrations(one)
    read = Calibrations(ready=of_one.fitted())
    for found in (of_one.of("synthetic", DEVICE, True), read.of("synthetic", DEVICE, True)):
        assert (found.efficiency, found.num_trials, found.num_memory_trials) == (None, 0, 9)
        assert found.notes[-1].startswith(
            "the trials ran on one node, so constants of times on several are the defaults"
        )
