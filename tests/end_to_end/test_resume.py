"""A run that dies and is started again continues as without interruption."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.distributed import run_distributed
from tests.end_to_end.conftest import Trained
from tests.end_to_end.launching import (
    NO_EVALUATION,
    TIMEOUT_S,
    Launch,
    error_lines,
    flags,
    num_metrics,
    read_metrics,
    train_on_this_rank,
)

ENDLESS_EVALUATION = ["--eval-interval", "4", "--eval-iters", "5000"]
"""After iteration 4 it takes minutes: the moment to die."""


@pytest.fixture(scope="module")
def killed(trained: Trained, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run like `trained`, with a checkpoint of iteration 3; its launcher was killed after iteration 4."""
    folder = tmp_path_factory.mktemp("killed")
    outputs = ["--save", "checkpoints", "--save-interval", "3", "--metrics-file", "metrics.jsonl"]
    run = Launch(folder, flags(data, *outputs, *ENDLESS_EVALUATION))
    metrics = folder / "metrics.jsonl"
    run.wait_for(lambda: num_metrics(metrics) == 4)
    there = run.processes()
    os.kill(there["the launcher"], signal.SIGKILL)
    # Its ranks end, too, and the exit code is an error.
    assert run.wait() != 0, run.output()
    assert not run.wait_for_all(TIMEOUT_S)
    (line,) = error_lines(run.output())
    assert f"process {there['the launcher']}) is gone" in line
    assert line.endswith("resume with --load checkpoints, from global_step3")
    return folder


def test_the_killed_run_left_a_whole_checkpoint(killed: Path, trained: Trained) -> None:
    checkpoints = killed / "checkpoints"
    assert (checkpoints / "latest").read_text() == "global_step3"
    info = json.loads((checkpoints / "global_step3" / "run.json").read_text())
    assert (info["iteration"], info["consumed_samples"]) == (3, 24)
    before, expected = read_metrics(killed / "metrics.jsonl")[0], read_metrics(trained.metrics)[0]
    assert [each["lm_loss"] for each in before] == [each["lm_loss"] for each in expected[:4]]


def test_resumed_it_gives_the_same_numbers_bit_for_bit(killed: Path, trained: Trained, data: Path) -> None:
    outputs = ["--save", "checkpoints", "--save-interval", "3", "--metrics-file", "resumed.jsonl"]
    assert run_distributed(train_on_this_rank, 2, flags(data, *outputs, "--load", "checkpoints"), killed) == [0, 0]
    found, evaluations = read_metrics(killed / "resumed.jsonl")
    expected, expected_evaluations = read_metrics(trained.metrics)
    assert [each["iteration"] for each in found] == [4, 5, 6]
    for name in ("lm_loss", "grad_norm", "learning_rate", "consumed_samples"):
        assert [each[name] for each in found] == [each[name] for each in expected[3:]]
    assert evaluations == expected_evaluations[1:]
    assert (killed / "checkpoints" / "latest").read_text() == "global_step6"


def test_a_run_continues_with_other_slices_schedule_stages_and_zero_stage(
    trained: Trained, data: Path, tmp_path: Path
) -> None:
    """test_reshape.py has the other layouts."""
    metrics = tmp_path / "metrics.jsonl"
    words = "--num-token-slices 1 --pipeline-schedule gpipe --zero-stage 0 --stage-partition 0,1,4".split()
    words += ["--load", trained.checkpoints, "--load-tag", "global_step3"]
    assert run_distributed(train_on_this_rank, 2, flags(data, *words, "--metrics-file", metrics)) == [0, 0]
    expected, found = read_metrics(trained.metrics)[0], read_metrics(metrics)[0]
    assert [each["iteration"] for each in found] == [4, 5, 6]
    for mine, theirs in zip(found, expected[3:], strict=True):
        assert mine["lm_loss"] == pytest.approx(theirs["lm_loss"], rel=1e-6)


def test_a_run_continues_from_its_initial_weights_bit_for_bit(data: Path, tmp_path: Path) -> None:
    """`--extra-save-iterations`, also 0, in addition to the checkpoints of the interval; in bf16."""
    checkpoints, metrics = tmp_path / "checkpoints", [tmp_path / f"{name}.jsonl" for name in ("whole", "resumed")]
    common = [*NO_EVALUATION, "--bf16", "--train-iters", "4"]
    saves = ["--save", checkpoints, "--save-interval", 3, "--extra-save-iterations", 0, 2, 9]
    loads = ["--load", checkpoints, "--load-tag", "global_step0"]
    for words, path in zip((saves, loads), metrics, strict=True):
        run = flags(data, *common, *words, "--metrics-file", path)
        assert run_distributed(train_on_this_rank, 2, run) == [0, 0]
    assert {path.name for path in checkpoints.glob("global_step*")} == {f"global_step{each}" for each in (0, 2, 3, 4)}
    expected, found = (read_metrics(path)[0] for path in metrics)
    for name in ("iteration", "lm_loss", "grad_norm", "learning_rate", "consumed_samples"):
        assert [each[name] for each in found] == [each[name] for each in expected]


FROM_WEIGHTS = {"--finetune": (1, 1, 8), "--no-load-optim": (7, 7, 56)}
"""Flags that load no state of the optimizer: with `--train-iters`, the iteration that is trained, and its samples."""


@pytest.mark.parametrize(("flag", "run"), FROM_WEIGHTS.items(), ids=FROM_WEIGHTS)
def test_only_the_weights_are_loaded_onto_one_stage(
    trained: Trained, data: Path, tmp_path: Path, flag: str, run: tuple[int, int, int]
) -> None:
    """`--finetune` starts at iteration 1, from the loss of the checkpoint; `--no-load-optim` continues."""
    path, (last, *trained_on) = tmp_path / "metrics.jsonl", run
    words = ["--load", trained.checkpoints, flag, "--train-iters", last, "--metrics-file", path]
    assert run_distributed(train_on_this_rank, 1, flags(data, *words, "--pipeline-model-parallel-size", "1")) == [0]
    (iteration,), _ = read_metrics(path)
    assert [iteration["iteration"], iteration["consumed_samples"]] == trained_on
    assert iteration["lm_loss"] < read_metrics(trained.metrics)[0][4]["lm_loss"]
