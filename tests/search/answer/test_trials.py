"""Trials: results are read from metrics and output, written at once, and not run twice."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_terapipe.config import ModelConfig
from megatron_terapipe.search.answer.output_files import launch_of
from megatron_terapipe.search.answer.trial_command import (
    Journal,
    Outcome,
    TrialSettings,
    command,
    explicit,
    outcome_of,
    over_rounds,
    run_launcher,
)
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.machine.cluster_files import parse_cluster
from megatron_terapipe.search.price.workload import gpt_workload
from megatron_terapipe.search.rank.space import SearchProblem
from megatron_terapipe.strategy import Strategy

MODEL = ModelConfig(num_layers=4, hidden_size=64, num_attention_heads=4, seq_length=64, vocab_size=256)
WORKLOAD = gpt_workload(MODEL)
MIXED = {
    "name": "mixed",
    "nodes": [
        {"hosts": ["a"], "device": "A100-SXM4-80GB", "devices": 2},
        {"hosts": ["b"], "device": "T4", "devices": 4, "network": {"bandwidth_Gbps": 25, "cards": 2}},
    ],
}


def cluster(document: object = MIXED) -> Cluster:
    return parse_cluster(document, "cluster.json")[0]


def pending(of: Journal, *strategies: Strategy, rounds: int = 1) -> list[Strategy]:
    return [each.strategy for each in of.pending(strategies, rounds)]


def journal(path: Path) -> Journal:
    problem = SearchProblem(workload=WORKLOAD, cluster=cluster(), precision="fp16", global_batch_size=8)
    return Journal(path=path, problem=problem)


def metrics(path: Path, times: list[float], peaks: list[int]) -> Path:
    lines = [{"iteration": number, "iteration_time_s": time_s} for number, time_s in enumerate(times, 1)]
    if lines:
        lines[-1]["peak_memory_bytes"] = peaks
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"iteration": 9, "iter')
    return path


def test_time_is_the_median_after_the_warm_up(tmp_path: Path) -> None:
    path = metrics(tmp_path / "m.jsonl", [9.0, 5.0, 4.0, 1.0, 1.2, 1.1], [10, 20])
    assert outcome_of(0, "", path, iterations=6) == Outcome(iteration_time_s=1.1, peak_memory_bytes=20)
    short = metrics(tmp_path / "m.jsonl", [9.0, 1.0], [10])
    assert outcome_of(0, "", short, iterations=2).iteration_time_s == 1.0


def test_failure_after_the_last_iteration_keeps_the_measurement(tmp_path: Path) -> None:
    path = metrics(tmp_path / "m.jsonl", [9.0, 1.0], [10])
    assert outcome_of(250, "", path, iterations=2).iteration_time_s == 1.0
    assert outcome_of(250, "", path, iterations=3).iteration_time_s is None


def test_rounds_count_by_their_median_and_those_that_failed_do_not() -> None:
    failed = Outcome(iteration_time_s=None, reason="it fell")
    runs = [
        Outcome(iteration_time_s=seconds, peak_memory_bytes=peak) for seconds, peak in ((3.0, 5), (1.0, 9), (2.0, 7))
    ]
    assert over_rounds([*runs, failed]) == Outcome(iteration_time_s=2.0, peak_memory_bytes=9)
    assert over_rounds([failed]) == failed


@pytest.mark.parametrize(
    ("exit_code", "output", "out_of_memory", "reason"),
    [
        (1, "x\ntorch.OutOfMemoryError: CUDA out of memory. Tried to\n", True, "torch.OutOfMemoryError: CUDA out of "),
        (1, "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you", True, "RuntimeError: ["),
        (247, "[launch.py:319:sigkill_handler] exits with return code = -9", True, "it ended with exit code 247"),
        (-9, "", True, "it ended with exit code -9"),
        (1, "Traceback\n  File\nValueError: no such thing\n[launch] killing", False, "ValueError: no such thing"),
        (2, "error: --lr 0 is wrong: give more", False, "--lr 0 is wrong: give more"),
        (2, "node-1: error: --lr 0 is wrong: give more\nnode-1: killing", False, "--lr 0 is wrong: give more"),
        (1, "node-1: ValueError: no such thing\nnode-1: [launch] killing", False, "ValueError: no such thing"),
    ],
)
def test_why_a_run_failed(exit_code: int, output: str, out_of_memory: bool, reason: str, tmp_path: Path) -> None:
    outcome = outcome_of(exit_code, output, tmp_path / "none.jsonl", iterations=3)
    assert outcome.iteration_time_s is None
    assert outcome.out_of_memory == out_of_memory
    assert (outcome.reason or "").startswith(reason)


def test_recorded_trials_are_not_run_again(tmp_path: Path) -> None:
    first = Strategy(pipeline_parallel_size=2, micro_batch_size=2, global_batch_size=8, num_token_slices=2)
    second, third = replace(first, zero_stage=0), replace(first, recompute="full")
    mine = journal(tmp_path / "new" / "trials.jsonl")
    assert pending(mine, first, second, first) == [first, second]
    mine.write(first, [Outcome(iteration_time_s=1.5, peak_memory_bytes=2.0**30)], trial_id="1")
    mine.write(third, [Outcome(iteration_time_s=None, out_of_memory=True, reason="no room")], trial_id="2")
    assert pending(mine, first, second, third) == [second]
    # Spelled out, it is the same run.
    assert pending(mine, explicit(first, WORKLOAD)) == []
    done, failed = mine.trials()
    assert (done.iteration_time_s, done.peak_memory_bytes, done.software.name) == (1.5, 2.0**30, "terapipe")
    assert (done.strategy, done.cluster, done.precision) == (explicit(first, WORKLOAD), cluster(), "fp16")
    assert done.workload.layers == WORKLOAD.layers
    assert (failed.iteration_time_s, failed.out_of_memory) == (None, True)
    other = replace(mine, problem=replace(mine.problem, global_batch_size=16))
    assert pending(other, first) == [first]


def test_interrupted_rounds_are_continued(tmp_path: Path) -> None:
    first, second = Strategy(pipeline_parallel_size=2, global_batch_size=8), Strategy(global_batch_size=8)
    mine = journal(tmp_path / "trials.jsonl")
    runs = [
        Outcome(iteration_time_s=3.0, peak_memory_bytes=2.0**30),
        Outcome(iteration_time_s=None, peak_memory_bytes=None, reason="it fell"),
        Outcome(iteration_time_s=1.0, peak_memory_bytes=2.0**31),
    ]
    for number in (1, 2):
        mine.write(first, runs[:number], trial_id="trial-1", rounds=3)
        (trial,) = mine.trials()
        assert (trial.id, trial.iteration_time_s, trial.rounds) == ("trial-1", 3.0, 3)
        assert trial.round_times_s == tuple(run.iteration_time_s for run in runs[:number])
        assert pending(mine, first, second, rounds=3) == [first, second]
        assert pending(mine, first, second) == [second]
    (name, _, begun), (other, _, none) = mine.pending([first, second], 3)
    assert (name, [run.iteration_time_s for run in begun], other, none) == ("trial-1", [3.0, None], "trial-3", [])
    mine.write(first, [*begun, runs[2]], trial_id=name, rounds=3)
    (trial,) = mine.trials()
    assert (trial.iteration_time_s, trial.peak_memory_bytes) == (2.0, 2.0**31)
    assert pending(mine, first, rounds=3) == pending(mine, first, rounds=5) == []


def settings(**more: object) -> TrialSettings:
    return TrialSettings(iterations=5, timeout_s=1, trainer=Path("/x/pretrain_gpt.py"), **more)  # type: ignore[arg-type]


def test_the_command_is_that_of_the_search_with_few_iterations(tmp_path: Path) -> None:
    two_nodes = {"nodes": [{"count": 2, "device": "T4", "devices": 1}]}
    problem = SearchProblem(workload=WORKLOAD, cluster=cluster(two_nodes), precision="fp16", global_batch_size=8)
    launch = launch_of(Strategy(pipeline_parallel_size=2), problem)
    launch.write(str(tmp_path))
    words = command(launch, tmp_path, settings(flags=("--seed", "7")), tmp_path / "m.jsonl")
    text = " ".join(words)
    assert f"--hostfile={tmp_path}/hostfile" in text
    assert f"/x/pretrain_gpt.py --strategy {tmp_path}/strategy.json" in text
    assert text.endswith(f"--metrics-file {tmp_path}/m.jsonl --mock-data --seed 7")
    # Of a flag given twice the last counts.
    assert words[len(words) - 1 - words[::-1].index("--train-iters") + 1] == "5"
    assert "--mock-data" not in command(launch, tmp_path, settings(flags=("--data-path", "d")), tmp_path / "m.jsonl")
    # Orders and host copies are found for the cluster of the trial.
    for found in ({"schedule": "optimised"}, {"offload": True, "recompute": "stage"}):
        launch = launch_of(Strategy(pipeline_parallel_size=2, **found), problem)  # type: ignore[arg-type]
        words = command(launch, tmp_path, settings(), tmp_path / "m.jsonl")
        assert words[words.index("--cluster") + 1] == f"{tmp_path}/cluster.json"


def test_a_run_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    begun = time.monotonic()
    program = "import time; print('hello', flush=True); time.sleep(60)"
    code, output = run_launcher([sys.executable, "-c", program], tmp_path, 1.0, on_cpu=True)
    assert (code, output) == (None, "hello\n")
    assert time.monotonic() - begun < 30
