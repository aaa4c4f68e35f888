"""The metrics file."""

import json
from dataclasses import replace
from math import nan
from pathlib import Path

from megatron_terapipe.training.build_reporters import MetricsFile
from megatron_terapipe.training.records import Saved
from tests.training.reporting.samples import EVALUATION, ITERATION, SKIPPED, TEST


def objects(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_object_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "metrics.jsonl"
    file = MetricsFile(str(path))
    file.iteration(ITERATION)
    assert objects(path) == [
        {
            "iteration": 7,
            "consumed_samples": 56,
            "lm_loss": 5.123456789012345,
            "grad_norm": 1.25,
            "learning_rate": 0.0001,
            "iteration_time_s": 0.5,
            "tokens_per_second": 512.0,
            "global_batch_size": 8,
            "tflops_per_device": 100.0,
            "mfu": 0.25,
            "loss_scale": None,
            "skipped_iterations": 2,
            "params_norm": None,
            "decoupled_learning_rate": None,
            "num_zeros_in_grad": None,
            "timers": None,
            "peak_memory_bytes": None,
            "spiky_loss": False,
            "large_grads": False,
        }
    ]
    file.evaluation(EVALUATION)
    assert objects(path)[1] == {"iteration": 7, "validation_lm_loss": 1000.0}
    file.evaluation(TEST)
    assert objects(path)[2] == {"iteration": 7, "test_lm_loss": 2.0}


def test_a_skipped_update_has_no_norm(tmp_path: Path) -> None:
    MetricsFile(str(tmp_path / "metrics.jsonl")).iteration(SKIPPED)
    assert objects(tmp_path / "metrics.jsonl")[0]["grad_norm"] is None


def test_a_loss_that_is_no_number_is_null_because_json_has_no_nan(tmp_path: Path) -> None:
    MetricsFile(str(tmp_path / "metrics.jsonl")).iteration(replace(SKIPPED, lm_loss=nan))
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    assert objects(tmp_path / "metrics.jsonl")[0]["lm_loss"] is None


def test_events_stand_between_them_with_the_iteration_and_the_time(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(str(path))
    file.event(Saved(iteration=3, seconds=0.5, time=1e9))
    file.iteration(ITERATION)
    file.note(" something was said")
    saved, _, note = objects(path)
    assert saved == {"event": "save", "iteration": 3, "seconds": 0.5, "time": 1e9}
    assert note.pop("time") > 1e9
    assert note == {"event": "note", "iteration": 7, "text": "something was said"}


def test_a_resumed_run_appends(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for _ in range(2):
        MetricsFile(str(path)).evaluation(EVALUATION)
    assert len(path.read_text().splitlines()) == 2
