"""From a measurement of this machine over a search to a run that trains, by the command that the search printed."""

import json
import shlex
from math import log
from pathlib import Path

import pytest

from megatron_terapipe.search.learn.trials import read_trials
from tests import warm
from tests.end_to_end.launching import read_metrics

MODEL = {
    **{"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 32, "vocab_size": 260},
    **{"hybrid_layer_pattern": "M-*", "mamba_head_dim": 16, "mamba_num_groups": 2},
}
CLUSTER = {"nodes": [{"hosts": ["localhost"], "device": "cpu-core", "devices": 2}]}


def search(folder: Path, *words: object) -> str:
    """Run a command of the search, and return its output."""
    done = warm.run(["terapipe", "search", *map(str, words)], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with a profile of this machine and the plan that was found with it; the output of `rank`."""
    folder = tmp_path_factory.mktemp("searched")
    (folder / "model.json").write_text(json.dumps(MODEL))
    (folder / "cluster.json").write_text(json.dumps(CLUSTER))
    sizes = ("--micro-batch-size", "1", "--num-token-slices", "1,2", "--tensor-parallel-size", "1")
    # One process: messages are measured elsewhere.
    search(folder, "measure", "model.json", *sizes, "--num-processes", "1", "--budget-s", "1", "--json", "profile.json")
    profile = ("--profile", "profile.json", "--global-batch-size", "4", "--pipeline-parallel-size", "2")
    printed = search(
        folder, "rank", "model.json", "cluster.json", *profile, "--num-token-slices", "2", "--output", "plan"
    )
    return folder, printed


def test_the_command_that_a_search_prints_trains(searched: tuple[Path, str]) -> None:
    folder, printed = searched
    (command,) = (
        line.strip() for line in printed.splitlines() if line.strip().startswith("DS_ACCELERATOR=cpu terapipe train")
    )
    assert "--num-accelerators 2 " in command
    more = ["--train-iters", "3", "--lr", "1e-2", "--eval-iters", "0", "--metrics-file", "metrics.jsonl"]
    done = warm.run(f"{command} {shlex.join(more)}", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    iterations, _ = read_metrics(folder / "metrics.jsonl")
    assert [each["global_batch_size"] for each in iterations] == [4] * 3
    # Tokens are drawn evenly from the vocabulary, and a model that has not begun to learn expects no other.
    losses = [each["lm_loss"] for each in iterations]
    assert losses == pytest.approx([log(MODEL["vocab_size"])] * 3, rel=0.01)
    assert len(set(losses)) == 3


def test_trials_are_run_recorded_and_not_repeated(searched: tuple[Path, str]) -> None:
    folder, _ = searched
    ranked = json.loads((folder / "plan" / "ranking.json").read_text())["entries"]
    (folder / "strategies.jsonl").write_text(json.dumps(ranked[0]) + "\n")
    words = ["trial", "model.json", "cluster.json", "--profile", "profile.json", "--global-batch-size", "4"]
    words += ["--strategies", "strategies.jsonl", "--iterations", "3"]
    first = search(folder, *words)
    (trial,) = read_trials(folder / "trials.jsonl")
    assert trial.software.name == "terapipe"
    assert (trial.iteration_time_s or 0) > 0
    assert (trial.peak_memory_bytes or 0) > 0
    assert trial.strategy.pipeline_parallel_size == 2
    assert "calibrated on them: mean error" in first
    again = search(folder, *words)
    assert "1 of 1 are in trials.jsonl and are not run again" in again
    assert len(read_trials(folder / "trials.jsonl")) == 1
