"""`--strategy auto` of the trainer trains the first strategy of `rank`."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from deepspeed_ext.plan.errors import UserError
from megatron_terapipe.arguments import read_arguments
from megatron_terapipe.arguments.build import NOT_SEARCHED
from megatron_terapipe.arguments.parser import flags
from megatron_terapipe.search.__main__ import main
from megatron_terapipe.search.answer.trial_command import Journal, Outcome
from megatron_terapipe.search.price.profile import write_profile
from megatron_terapipe.search.rank.space import SearchProblem
from megatron_terapipe.strategy import Strategy
from megatron_terapipe.training.auto_plan import STRATEGY_FILE, find_strategy
from tests.search.learn.test_profile_calibration import CLUSTER, STRATEGIES, WORKLOAD, truth_s
from tests.search.price.profiles import profile

MODEL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size"
TRAINER = "--train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --strategy auto --global-batch-size 16"


MEASURED = ("--cluster", "cluster.json", "--op-profile", "profile.json")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a cluster of two ranks, its profile and trials on it; this process is the second rank."""
    (tmp_path / "cluster.json").write_text('{"nodes": [{"device": "cpu-core", "devices": 2}]}')
    write_profile(profile(), str(tmp_path / "profile.json"))
    trials = tmp_path / "trials.jsonl"
    problem = SearchProblem(workload=WORKLOAD, cluster=CLUSTER, precision="fp32", global_batch_size=8)
    journal = Journal(path=trials, problem=problem)
    for each in STRATEGIES:
        journal.write(each, [Outcome(iteration_time_s=truth_s(each))], trial_id=str(each))
    launched_on(2, monkeypatch)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def launched_on(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", 1), ("WORLD_SIZE", world_size), ("LOCAL_RANK", 1), ("LOCAL_SIZE", 2)):
        monkeypatch.setenv(name, str(value))


def chosen(*words: str) -> tuple[Strategy, str]:
    """The strategy of the trainer, and the line that it prints."""
    # A null tokenizer adds a token.
    read = read_arguments([*MODEL.split(), "255", *TRAINER.split(), *words], find_strategy)
    parallel = read.config.parallel
    model = replace(read.config.model, vocab_size=256)
    found = Strategy.of_config(replace(read.config, model=model), parallel.data_parallel_size or 0)
    return found, next(line for line in read.notices if line.startswith("--strategy auto"))


def first_of_rank(*words: str) -> Strategy:
    fixed = ("--precision", "fp32", "--global-batch-size", "16", "--json", "ranking.json")
    assert main(["rank", "-", "cluster.json", *MODEL.split(), "256", *fixed, *words]) == 0
    return Strategy.from_json(json.loads(Path("ranking.json").read_text())["entries"][0]["strategy"])


def same(mine: Strategy, theirs: Strategy) -> bool:
    """Whether two strategies are the same run."""
    lengths = theirs.cut(64).lengths
    bounds = WORKLOAD.partition(theirs.stage_partition, theirs.pipeline_parallel_size * theirs.num_model_chunks)
    mine_bounds = WORKLOAD.partition(mine.stage_partition, mine.pipeline_parallel_size * mine.num_model_chunks)
    alike = {"token_slices": lengths, "stage_partition": "uniform"}
    return (
        bounds == mine_bounds and replace(mine, **alike) == replace(theirs, **alike) and mine.cut(64).lengths == lengths
    )


@pytest.mark.parametrize(
    ("trainer", "rank"),
    [
        ("", ""),
        ("--pipeline-model-parallel-size 2 --pipeline-schedule 1f1b", "--pipeline-parallel-size 2 --schedule 1f1b"),
        ("--token-slices 40,24 --micro-batch-size 2", "--token-slices 40,24 --micro-batch-size 2"),
        ("--token-slices auto --stage-partition auto", "--stage-partition solved"),
        ("--tensor-model-parallel-size 2 --sequence-parallel", "--tensor-parallel-size 2 --sequence-parallel on"),
        ("--op-calibration trials.jsonl", "--calibrate trials.jsonl"),
    ],
)
def test_trainer_runs_the_first_of_rank(trainer: str, rank: str, files: Path) -> None:
    found, line = chosen(*MEASURED, *trainer.split())
    best = first_of_rank("--profile", "profile.json", *rank.split())
    assert same(found, best), (found, best)
    assert f"pipeline-parallel-size {best.pipeline_parallel_size}" in line
    assert "for the cluster cluster.json with the profile profile.json" in line


def test_profile_and_calibration_are_used(files: Path) -> None:
    seconds = []
    for words in (("--cluster", "cluster.json"), MEASURED, (*MEASURED, "--op-calibration", "trials.jsonl")):
        _, line = chosen(*words)
        seconds.append(float(line.partition("predicted to take ")[2].split()[0]))
    assert len(set(seconds)) == 3
    # Trials took 1.3 times as long as the profile says.
    assert seconds[2] / seconds[1] == pytest.approx(1.3, rel=0.05)


def test_without_a_cluster_hosts_are_those_of_the_launcher(files: Path) -> None:
    found, line = chosen("--op-profile", "profile.json")
    assert found == chosen(*MEASURED)[0]
    assert "for 1 host of 2 cpu-core with the profile profile.json" in line


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ("--data-parallel-size 2", 2),
        ("--data-parallel-size 2 --pipeline-model-parallel-size 2", 4),
        ("--pipeline-model-parallel-size 2", 2),
        ("", 1),
    ],
)
def test_ranks_of_a_dry_run_without_launcher(
    words: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    found, line = chosen("--dry-run", *words.split())
    assert found.world_size == ranks
    assert f"for 1 host of {ranks} " in line


def test_run_continues_with_its_strategy(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Strategy(data_parallel_size=2, micro_batch_size=1, global_batch_size=16, zero_stage=0)
    (files / "run").mkdir()
    path = files / "run" / STRATEGY_FILE
    path.write_text(json.dumps(other.to_json()))
    assert chosen(*MEASURED)[0] != other
    found, line = chosen(*MEASURED, "--load", "run")
    assert same(found, other)
    assert line == f"--strategy auto uses run/{STRATEGY_FILE}"
    with pytest.raises(
        UserError, match=r"--micro-batch-size 4 contradicts --strategy run/strategy.json, where it is 1"
    ):
        chosen(*MEASURED, "--load", "run", "--micro-batch-size", "4")
    path.write_text(json.dumps(replace(other, data_parallel_size=4, global_batch_size=16).to_json()))
    found, line = chosen(*MEASURED, "--load", "run")
    assert found == chosen(*MEASURED)[0]
    assert line == "--strategy auto searches again: run/strategy.json is for 4 ranks, and this run has 2"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--rampup-batch-size 8 8 100", "--strategy auto does not search with --rampup-batch-size"),
        ("--step-batch-size-schedule 0:8", "--strategy auto does not search with --step-batch-size-schedule 0:8"),
        (
            "--pipeline-schedule optimised",
            "--strategy auto does not search with --pipeline-schedule optimised: drop one",
        ),
        (
            "--token-slices balanced --num-token-slices 2",
            "--strategy auto does not search with --token-slices balanced",
        ),
        ("--cluster large.json", "--cluster large.json has 4 devices, more than the 2 ranks of this run"),
        ("--op-profile cluster.json", "--op-profile: cluster.json.*format"),
        (
            "--pipeline-model-parallel-size 2 --data-parallel-size 2",
            "--strategy auto found no strategy for the cluster",
        ),
    ],
)
def test_flags_that_do_not_go_with_a_search(words: str, line: str, files: Path) -> None:
    (files / "large.json").write_text('{"nodes": [{"device": "cpu-core", "devices": 4}]}')
    with pytest.raises(UserError, match=f"^{line}") as caught:
        chosen("--cluster", "cluster.json", *words.split())
    assert "\n" not in str(caught.value)


def test_a_batch_is_needed_and_a_run(files: Path) -> None:
    words = [*MODEL.split(), "255", *TRAINER.split()]
    with pytest.raises(UserError, match="--strategy auto is found when a run starts: name a strategy file here"):
        read_arguments(words)
    with pytest.raises(UserError, match=r"--strategy auto .*add --global-batch-size"):
        read_arguments(words[:-2], find_strategy)


def test_fields_that_are_not_searched_are_flags() -> None:
    assert set(NOT_SEARCHED) <= {each.name for each in flags()}
