"""Published times, with nothing fitted to them; skipped where the trials are not there."""

from collections import defaultdict
from pathlib import Path

import pytest

from megatron_terapipe.search.learn.trials import read_trials
from megatron_terapipe.search.price.cost_model import CostModel

ROOT = Path(__file__).resolve().parents[3]
TRIALS = ROOT.parent / "shared" / "reference" / "trials"

pytestmark = pytest.mark.skipif(not TRIALS.exists(), reason="the measured runs are not here")


def predicted(name: str) -> list[tuple[str, str, float, float]]:
    """Group, name, measured and predicted seconds of the trials of a file."""
    rows = []
    for trial in read_trials(TRIALS / f"{name}.jsonl"):
        model = CostModel(trial.workload, trial.cluster, software=trial.software, precision=trial.precision)
        seconds = model.predict_time(trial.strategy, activation_limit=trial.activation_limit).iteration_time_s
        assert trial.iteration_time_s is not None
        rows.append((trial.group, trial.id.rsplit(":", 1)[-1], trial.iteration_time_s, seconds))
    return rows


@pytest.mark.parametrize(("name", "most"), [("sc21", 0.08), ("seqsel", 0.035)])
def test_times_of_megatron(name: str, most: float) -> None:
    errors = [abs(seconds / measured - 1) for _, _, measured, seconds in predicted(name)]
    assert sum(errors) / len(errors) <= most


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
