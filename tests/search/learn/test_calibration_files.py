import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.learn.calibration import Calibration, calibrate
from megatron_terapipe.search.learn.cluster_calibrations import (
    Calibrations,
    calibrated,
    read_calibrations,
    write_calibrations,
)
from megatron_terapipe.search.machine import library
from megatron_terapipe.search.machine.cluster import Cluster, Link, Node
from tests.search.learn.synthetic import CLUSTER, STRATEGIES, a100s, measured

DEVICE = CLUSTER.nodes[0].device.name


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return calibrate(measured(STRATEGIES[:4], noise=0.05))


def written(tmp_path: Path, *calibrations: Calibration, **changes: Any) -> str:
    path = tmp_path / "c.json"
    write_calibrations(str(path), calibrations)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return str(path)


def test_what_is_written_is_read_back(tmp_path: Path, calibration: Calibration) -> None:
    (again,) = read_calibrations(written(tmp_path, calibration))
    assert again.efficiency == calibration.efficiency and again.memory_overheads == calibration.memory_overheads
    assert (again.source, again.device, again.num_trials) == ("synthetic", DEVICE, 4)
    slopes = np.ones((1, len(calibration.intervals.parameter_names)))
    assert again.intervals.half_width(slopes) == pytest.approx(calibration.intervals.half_width(slopes))
    assert calibrated(CLUSTER, str(tmp_path / "c.json")).efficiency == calibration.efficiency


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": "other"}, "format"),
        ({"version": 9}, "version 9 is not 2"),
        ({"calibrations": []}, "calibrations [] is an empty list"),
        ({"calibrations": [{"source": "s"}]}, "calibrations[0].device is missing"),
    ],
)
def test_errors(tmp_path: Path, calibration: Calibration, changes: dict[str, Any], said: str) -> None:
    path = written(tmp_path, calibration, **changes)
    with pytest.raises(ConfigError) as error:
        read_calibrations(path)
    assert path in str(error.value) and said in str(error.value)


def test_wrong_constants(tmp_path: Path, calibration: Calibration) -> None:
    path = Path(written(tmp_path, calibration))
    for part, value, said in (("covariance", [[1]], "table"), ("parameter_names", ["warp"], "constants")):
        document = json.loads(path.read_text())
        document["calibrations"][0]["intervals"][part] = value
        (tmp_path / "wrong.json").write_text(json.dumps(document))
        with pytest.raises(ConfigError, match=said):
            read_calibrations(str(tmp_path / "wrong.json"))


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
    # Memory knows no nodes; few trials of a kind are calibrated with the others.
    assert calibrations.of("synthetic", DEVICE, True).num_memory_trials == 17
    few = Calibrations([*several[:3], *one])
    assert (few.of("synthetic", DEVICE, True).num_trials, few.of("synthetic", DEVICE, False).num_trials) == (12, 9)
