"""A run that dies and is started again goes on as if nothing had happened."""

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
    launch,
    num_metrics,
    read_metrics,
    train_on_this_rank,
)

ENDLESS_EVALUATION = ["--eval-interval", "4", "--eval-iters", "5000"]
"""After iteration 4 it takes minutes: the moment to die."""


@pytest.fixture(scope="module")
def killed(trained: Trained, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run like `trained` whose launcher was killed after iteration 4, with a checkpoint of iteration 3."""
    folder = tmp_path_factory.mktemp("killed")
    outputs = ["--save", "checkpoints", "--save-interval", "3", "--metrics-file", "metrics.jsonl"]
    run = Launch(folder, flags(data, *outputs, *ENDLESS_EVALUATION))
    metrics = folder / "metrics.jsonl"
    run.wait_for(lambda: num_metrics(metrics) == 4)
    there = run.processes()
    os.kill(there["the launcher"], signal.SIGKILL)
    # Its ranks do not train on alone, and the command does not end as if all were well.
    assert run.wait() != 0, run.output()
    assert not run.wait_for_all(TIMEOUT_S)
    (line,) = error_lines(run.output())
    assert f"process {there['the launcher']}) is gone" in line
    assert line.endswith("resume with --load checkpoints, which goes on from global_step3")
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
    launch(killed, flags(data, *outputs, "--load", "checkpoints"))
    found, evaluations = read_metrics(killed / "resumed.jsonl")
    expected, expected_evaluations = read_metrics(trained.metrics)
    assert [each["iteration"] for each in found] == [4, 5, 6]
    for name in ("lm_loss", "grad_norm", "learning_rate", "consumed_samples"):
        assert [each[name] for each in found] == [each[name] for each in expected[3:]]
    assert evaluations == expected_evaluations[1:]
    assert (killed / "checkpoints" / "latest").read_text() == "global_step6"


@pytest.mark.parametrize(
    "resumed_with",
    ["--num-token-slices 1 --pipeline-schedule gpipe", "--zero-stage 0 --stage-partition 0,1,4"],
)
def test_a_run_goes_on_in_whatever_way_it_may(trained: Trained, data: Path, tmp_path: Path, resumed_with: str) -> None:
    """Token slices, schedule, stages and ZeRO may change; test_reshape.py has every pair of layouts."""
    metrics = tmp_path / "metrics.jsonl"
    words = [*resumed_with.split(), "--load", trained.checkpoints, "--load-tag", "global_step3"]
    assert run_distributed(train_on_this_rank, 2, flags(data, *words, "--metrics-file", metrics)) == [0, 0]
    expected, found = read_metrics(trained.metrics)[0], read_metrics(metrics)[0]
    assert [each["iteration"] for each in found] == [4, 5, 6]
    for mine, theirs in zip(found, expected[3:], strict=True):
        assert mine["lm_loss"] == pytest.approx(theirs["lm_loss"], rel=1e-6)


def test_a_run_goes_on_from_its_initial_weights_and_from_what_was_saved_between(data: Path, tmp_path: Path) -> None:
    """`--extra-save-iterations`: checkpoints beside those of the interval, bit for bit, in bf16."""
    checkpoints, metrics = tmp_path / "checkpoints", [tmp_path / f"{name}.jsonl" for name in ("whole", "0", "2")]
    common = [*NO_EVALUATION, "--bf16", "--train-iters", "4"]
    saves = ["--save", checkpoints, "--save-interval", 3, "--extra-save-iterations", 0, 2, 9]
    whole = flags(data, *common, *saves, "--metrics-file", metrics[0])
    assert run_distributed(train_on_this_rank, 2, whole) == [0, 0]
    assert {path.name for path in checkpoints.glob("global_step*")} == {f"global_step{each}" for each in (0, 2, 3, 4)}
    expected = read_metrics(metrics[0])[0]
    for path, iteration in zip(metrics[1:], (0, 2), strict=True):
        loaded = ["--load", checkpoints, "--load-tag", f"global_step{iteration}"]
        resumed = flags(data, *common, *loaded, "--metrics-file", path)
        assert run_distributed(train_on_this_rank, 2, resumed) == [0, 0]
        found = read_metrics(path)[0]
        assert [each["iteration"] for each in found] == list(range(iteration + 1, 5))
        for name in ("lm_loss", "grad_norm", "learning_rate", "consumed_samples"):
            assert [each[name] for each in found] == [each[name] for each in expected[iteration:]]


@pytest.mark.parametrize("stages", [1, 2])
def test_the_weights_alone_load_onto_other_stages(trained: Trained, data: Path, tmp_path: Path, stages: int) -> None:
    """`--finetune` starts over at iteration 1, from the loss that the checkpoint had come down to."""
    path = tmp_path / "metrics.jsonl"
    more = ["--load", trained.checkpoints, "--finetune", "--metrics-file", path, "--train-iters", "1"]
    more += ["--pipeline-model-parallel-size", stages]
    assert run_distributed(train_on_this_rank, stages, flags(data, *more)) == [0] * stages
    (iteration,), _ = read_metrics(path)
    assert iteration["iteration"] == 1
    before = read_metrics(trained.metrics)[0]
    assert iteration["lm_loss"] < before[4]["lm_loss"]


def test_no_load_optim_goes_on_at_the_iteration_with_a_fresh_optimizer(
    trained: Trained, data: Path, tmp_path: Path
) -> None:
    path = tmp_path / "metrics.jsonl"
    more = ["--load", trained.checkpoints, "--no-load-optim", "--train-iters", "7", "--metrics-file", path]
    assert run_distributed(train_on_this_rank, 1, flags(data, *more, "--pipeline-model-parallel-size", "1")) == [0]
    (iteration,), _ = read_metrics(path)
    assert (iteration["iteration"], iteration["consumed_samples"]) == (7, 56)
    assert iteration["lm_loss"] < read_metrics(trained.metrics)[0][4]["lm_loss"]
