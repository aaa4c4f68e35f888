"""The metrics file and the lines of the log."""

import json
from pathlib import Path

from megatron_terapipe.training.metrics import EvaluationMetrics, IterationMetrics, MetricsFile

ITERATION = IterationMetrics(
    iteration=7,
    consumed_samples=56,
    lm_loss=5.123456789012345,
    grad_norm=1.25,
    learning_rate=1e-4,
    iteration_time_s=0.5,
    tokens_per_second=512.0,
)
EVALUATION = EvaluationMetrics(iteration=7, validation_lm_loss=1000.0)


def test_each_object_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "metrics.jsonl"
    file = MetricsFile(str(path))
    file.write(ITERATION)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {
            "iteration": 7,
            "consumed_samples": 56,
            "lm_loss": 5.123456789012345,
            "grad_norm": 1.25,
            "learning_rate": 0.0001,
            "iteration_time_s": 0.5,
            "tokens_per_second": 512.0,
        }
    ]
    file.write(EVALUATION)
    assert json.loads(path.read_text().splitlines()[1]) == {"iteration": 7, "validation_lm_loss": 1000.0}


def test_a_resumed_run_appends(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for _ in range(2):
        MetricsFile(str(path)).write(EVALUATION)
    assert len(path.read_text().splitlines()) == 2


def test_without_a_path_nothing_is_written(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    MetricsFile(None).write(ITERATION)
    assert not list(tmp_path.iterdir())


def test_lines_for_people() -> None:
    line = ITERATION.line(100)
    for part in ("iteration        7/     100 |", "time per iteration (ms): 500.0 |", "lm loss: 5.123457E+00 |"):
        assert part in line
    # A loss of 1000 has no finite perplexity: it is cut at e^20.
    assert "lm loss PPL: 4.851652E+08 |" in EVALUATION.line(100)
