"""Predictions of trials that no fit has seen, and their scores."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_terapipe.search.__main__ import main
from megatron_terapipe.search.learn.cluster_calibrations import Calibrations
from megatron_terapipe.search.learn.validation import (
    Group,
    deal_groups,
    folds_of,
    mean,
    naive_memory_bytes,
    naive_time_s,
    pair_accuracy,
    predict_in_folds,
    predict_trials,
    relative_errors,
    spearman,
    top1_regret,
    validation_document,
)
from megatron_terapipe.search.price.workload import gpt_workload
from megatron_terapipe.strategy import Strategy
from tests.search.learn.synthetic import STRATEGIES, WORKLOAD, failed, measured

MODEL = {"num_layers": 8, "hidden_size": 1024, "num_attention_heads": 16, "seq_length": 1024, "vocab_size": 51200}
CLUSTER = {"device": "A100-SXM4-80GB", "devices_per_node": 8, "num_devices": 8, "intra_node_GBps": 300}
FIGURES = {"n", "mape", "spearman", "pair_accuracy", "pair_accuracy_all", "top1_regret", "memory", "groups"}


def write_trials(path: Path, times: dict[int, float | None], source: str = "here") -> str:
    lines = []
    for (size, time_s), index in product(times.items(), range(2)):
        batch = 32 * (1 + index % 2)
        strategy = Strategy(
            data_parallel_size=8 // size, tensor_parallel_size=size, global_batch_size=batch, recompute="full"
        )
        failed = {"iteration_time_s": None, "out_of_memory": True}
        measured = failed if time_s is None else {"iteration_time_s": time_s, "peak_memory_bytes": 10e9}
        line = {"source": source, "group": f"batch {batch}", "software": "megatron-lm", "precision": "fp16"}
        line |= {"model": MODEL, "cluster": CLUSTER, "strategy": strategy.to_json(), "measured": measured}
        lines.append(json.dumps(line))
    path.write_text("\n".join(lines))
    return str(path)


def validate(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["validate", *words, "--json", "-"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_scores_of_trials_that_the_model_makes() -> None:
    trials = measured(STRATEGIES[:8])
    trials[0] = failed(trials[0])
    document = validation_document(
        predict_trials(trials, Calibrations()), calibrated_on=(), in_sample=0, num_folds=None
    )
    figures, memory = document["overall"], document["overall"]["memory"]
    assert figures["mape"] == pytest.approx(0, abs=1e-9) and memory["mape"] == pytest.approx(0, abs=1e-9)
    assert figures["pair_accuracy"] == figures["interval_coverage"] == 1.0
    assert figures["naive"]["mape"] > 0.1
    assert (figures["n"], len(document["predictions"])) == (7, 8)
    # The model says that all fit, as they do: a failure that nobody saw coming.
    assert (memory["out_of_memory"], memory["out_of_memory_recall"], memory["false_alarms"]) == (1, 0.0, 0.0)


def test_folds_keep_groups_whole() -> None:
    trials = measured(STRATEGIES[:10])
    folds = deal_groups(trials, 3)
    assert set(folds) == {0, 1, 2}
    assert all(folds[index] == folds[index + 1] for index in range(0, 10, 2))
    assert folds == deal_groups(trials, 3)


def test_trials_are_predicted_by_fits_without_them() -> None:
    """An unpredictable time moves the predictions of all other groups, and not its own."""
    trials = measured(STRATEGIES[:4])
    before = [one.iteration_time_s for one in predict_in_folds(trials, deal_groups(trials, 2))]
    for index in (0, 1):
        object.__setattr__(trials[index], "iteration_time_s", 1.5 * (trials[index].iteration_time_s or 0))
    after = [one.iteration_time_s for one in predict_in_folds(trials, deal_groups(trials, 2))]
    assert np.isclose(before, after, rtol=1e-6).tolist() == [True, True, False, False]


def test_clusters_without_calibration_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_trials(tmp_path / "a.jsonl", {1: 0.2, 2: 0.21})
    of_two = validate(capsys, "--trials", path, "--folds", "2")["sources"]["a"]
    assert (of_two["trials"], of_two["nothing_fitted"]) == (4, 0)
    Path(path).write_text("\n".join(Path(path).read_text().splitlines()[::2]))
    of_one = validate(capsys, "--trials", path, "--folds", "2")["sources"]["a"]
    assert (of_one["trials"], of_one["nothing_fitted"], of_one["calibration_source"]) == (2, 2, None)
    assert main(["validate", "--trials", path, "--folds", "2"]) == 0
    assert "NOTHING FITTED for a (2 of 2 trials)" in " ".join(capsys.readouterr().out.split())


def test_folds_may_leave_out_sizes() -> None:
    trials = measured(STRATEGIES[:3])
    assert folds_of(trials, None, "hidden_size") == [2048] * 3 and folds_of(trials, None, "devices") == [16] * 3
    assert len(set(folds_of(trials, None, "layers") or ())) == 1
    # A model that is cut short is the same model.
    cut, wider = (
        replace(trials[0], workload=gpt_workload(replace(WORKLOAD.config, **change)))
        for change in ({"num_layers": 2}, {"ffn_hidden_size": 64})
    )
    whole, short, other = folds_of([trials[0], cut, wider], None, "model") or ()
    assert whole == short != other
    assert [one.calibration.num_trials for one in predict_in_folds(trials, [1, 2, 2])] == [2, 1, 1]


def test_the_naive_line() -> None:
    """SC'21 (arXiv 2104.04473) equation 3: 96 B s L h^2 (1 + s/6h + V/16Lh) FLOPs with full recomputation."""
    (trial,) = measured([STRATEGIES[1]])
    assert trial.strategy.recompute == "full" and trial.strategy.pipeline_parallel_size == 1
    layers, hidden, tokens, words = 16, 2048, 1024, 51200
    formula = 96 * 64 * tokens * layers * hidden**2 * (1 + tokens / (6 * hidden) + words / (16 * layers * hidden))
    assert naive_time_s(trial) == pytest.approx(formula / (16 * 0.45 * 312e12), rel=0.001)
    assert naive_memory_bytes(trial) == 16 * WORKLOAD.parameters


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_trials(tmp_path / "a.jsonl", {1: 0.2, 2: 0.21, 4: 0.25, 8: None})
    document = validate(capsys, "--trials", path)
    assert set(document["sources"]) == {"a"} and set(document["groups"]["a"]) == {"batch 32", "batch 64"}
    for figures in (document["overall"], document["sources"]["a"], document["groups"]["a"]["batch 32"]):
        assert set(figures) >= {*FIGURES, "interval_coverage", "naive"} and set(figures["naive"]) >= FIGURES
    assert document["calibrated_on"] == [] and document["in_sample"] == 0
    assert len(document["predictions"]) == 8
    # A table has 100 columns where the output is no terminal.
    assert main(["validate", "--trials", write_trials(tmp_path / f"{'a' * 100}.jsonl", {1: 0.2, 2: 0.21})]) == 0
    assert "a" * 8 in (printed := capsys.readouterr().out) and max(map(len, printed.splitlines())) <= 100


def test_saved_calibration_and_in_sample_trials(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_trials(tmp_path / "a.jsonl", {1: 0.4, 2: 0.42, 4: 0.5, 8: 0.8})
    before = validate(capsys, "--trials", path)
    saved = str(tmp_path / "c.json")
    after = validate(capsys, "--trials", path, "--calibrate", path, "--save-calibration", saved)
    assert (after["in_sample"], after["calibrated_on"]) == (8, [path])
    assert after["overall"]["mape"] < before["overall"]["mape"]
    assert validate(capsys, "--trials", path, "--leave-out", "layers")["left_out"] == "layers"
    # All trials have as many layers, so that there is nothing to learn from, and a note says so.
    assert main(["validate", "--trials", path, "--leave-out", "layers"]) == 0
    assert "NOTHING FITTED for a (8 of 8 trials)" in " ".join(capsys.readouterr().out.split())
    again = validate(capsys, "--trials", path, "--calibration", saved)
    assert again["overall"]["mape"] == pytest.approx(after["overall"]["mape"])
    assert main(["validate", "--trials", path, "--calibrate", path]) == 0
    assert "IN-SAMPLE: 8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--folds", "1"], "--folds 1 leaves no trials"),
        (["--save-calibration", "c.json", "--profile", "p.json"], "keeps constants of formulas"),
        (["--save-calibration", "c.json"], "nothing to save"),
        (["--calibration", "c.json", "--folds", "2"], "already fitted"),
        (["--calibration", "c.json", "--leave-out", "layers"], "already fitted"),
        (["--leave-out", "layers", "--folds", "2"], "not allowed with argument"),
        (["--calibrate", "none.jsonl"], "none.jsonl cannot be read"),
        (["--json", "/dev/null/place.json"], "cannot be written"),
    ],
)
def test_errors(words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_trials(tmp_path / "a.jsonl", {8: 0.4})
    assert main(["validate", "--trials", path, *words]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ") and said in shown and shown.count("\n") == 1


INFINITE = float("inf")


def group(measured: list[float], predicted: list[float]) -> Group:
    return np.array(measured), np.array(predicted)


def test_relative_errors() -> None:
    measured, predicted = group([1, 2, INFINITE], [1.1, 1.8, 9])
    assert relative_errors(measured, predicted) == pytest.approx([0.1, -0.1])
    assert mean([]) is None and mean([1.0, None]) == 1.0


@pytest.mark.parametrize(
    ("measured", "predicted", "expected"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 40], 1),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1),
        # Without ties it is 1 - 6 sum d^2 / (n (n^2 - 1)).
        ([1, 2, 3, 4, 5], [1, 3, 2, 5, 4], 1 - 6 * 4 / (5 * 24)),
        # A failed run is the slowest there is.
        ([1, 2, 3, INFINITE], [1, 2, 3, 4], 1),
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3, 4], [7, 7, 7, 7], None),
    ],
)
def test_rank_correlation(measured: list[float], predicted: list[float], expected: float | None) -> None:
    assert spearman(group(measured, predicted)) == (expected and pytest.approx(expected))


def test_pairs() -> None:
    # 1.00 and 1.03 are too close; of the other two pairs one is in order.
    assert pair_accuracy([group([1.0, 1.03, 2.0], [1.5, 3.0, 2.0])], 0.05) == (2, pytest.approx(1.0 / 2))
    assert pair_accuracy([group([1.0, 1.03, 2.0], [1.5, 3.0, 2.0])], 0.0) == (3, pytest.approx(2.0 / 3))
    assert pair_accuracy([group([1.0, 2.0], [1.0, 1.0])], 0.05) == (1, pytest.approx(0.5 / 1))
    # Of two failed runs nobody knows the order; either is slower than one that did not fail.
    assert pair_accuracy([group([1.0, INFINITE, INFINITE], [1.0, 2.0, 0.5])], 0.05) == (
        2,
        pytest.approx(1.0 / 2),
    )
    assert pair_accuracy([group([1, 2], [1, 2]), group([1, 2], [2, 1])], 0.05) == (2, 0.5)
    assert pair_accuracy([], 0.05) == (0, None)


def test_regret() -> None:
    assert top1_regret(group([1.0, 1.2, 2.0], [5.0, 4.0, 6.0])) == pytest.approx(0.2)
    assert top1_regret(group([1.0, 1.2], [4.0, 4.0])) == pytest.approx(0.1)  # either, by chance
    assert top1_regret(group([1.0, 1.5, INFINITE], [5.0, 6.0, 4.0])) == pytest.approx(0.5)
    assert top1_regret(group([1.0], [1.0])) is None
