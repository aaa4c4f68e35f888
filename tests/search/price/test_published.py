"""Large runs that others published, priced with the software that ran them, without a fit.

`benchmarks/published/runs.jsonl` has the figures with their sources. Micro-batch sizes, model chunks and layouts that
are not published are assumed, as the line notes.
"""

from collections import defaultdict
from pathlib import Path
from statistics import median

import pytest

from benchmarks import published
from megatron_terapipe.search.learn.fit import cost_model_of
from megatron_terapipe.search.learn.trials import read_trials

RUNS = read_trials(published.RUNS)


def error(name: str) -> float:
    run = next(each for each in RUNS if each.id == name)
    assert run.iteration_time_s is not None
    return cost_model_of(run).predict_time(run.strategy).iteration_time_s / run.iteration_time_s - 1


@pytest.mark.parametrize("name", [run.id for run in RUNS])
def test_published_runs_are_predicted(name: str) -> None:
    assert abs(error(name)) <= 0.20


def test_half_of_them_are_within_eight_per_cent() -> None:
    assert median(abs(error(run.id)) for run in RUNS) <= 0.08


ROOT = Path(__file__).resolve().parents[3]
TRIALS = ROOT.parent / "shared" / "reference" / "trials"

measured_runs = pytest.mark.skipif(not TRIALS.exists(), reason="the measured runs are not here")


def predicted(name: str) -> list[tuple[str, str, float, float]]:
    """Group, name, measured and predicted seconds of the trials of a file."""
    rows = []
    for trial in read_trials(TRIALS / f"{name}.jsonl"):
        limit = trial.activation_limit
        seconds = cost_model_of(trial).predict_time(trial.strategy, activation_limit=limit).iteration_time_s
        assert trial.iteration_time_s is not None
        rows.append((trial.group, trial.id.rsplit(":", 1)[-1], trial.iteration_time_s, seconds))
    return rows


@measured_runs
@pytest.mark.parametrize(("name", "most"), [("sc21", 0.08), ("seqsel", 0.07)])
def test_times_of_megatron(name: str, most: float) -> None:
    errors = [abs(seconds / measured - 1) for _, _, measured, seconds in predicted(name)]
    assert sum(errors) / len(errors) <= most


@measured_runs
def test_the_order_of_schedules() -> None:
    setups = defaultdict(list)
    for group, schedule, measured, seconds in predicted("zero_bubble"):
        setups[group].append((measured, seconds, schedule))
    assert len(setups) == 6
    for group, rows in setups.items():
        for measured, seconds, schedule in rows:
            for other_measured, other_seconds, other in rows:
                if measured < other_measured:
                    assert seconds < other_seconds, f"{group}: {schedule} was faster than {other}"
