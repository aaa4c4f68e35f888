"""The first lines of a log: rows of the run, and warnings."""

from dataclasses import replace
from pathlib import Path

import pytest

from deepspeed_ext.runtime.launch import LaunchEnvironment
from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.training.run import Run, prepare
from megatron_terapipe.training.run_summary import rows_of_run, start_of_log, table, warnings_of_run
from tests.inference.checkpoints import checkpoint_info, write_checkpoint
from tests.training.gpt_runs import FLAGS

LAUNCH = LaunchEnvironment(rank=0, world_size=2, local_rank=0, local_size=2)


def prepared(words: str = "") -> Run:
    given = FLAGS.replace("--data-path unread", "--mock-data --pipeline-model-parallel-size 2")
    return prepare(parse_arguments(f"{given} {words}".split()), LAUNCH)


def resumed(run: Run, saved: Path, **facts: object) -> Run:
    """Return the run with a checkpoint to resume from."""
    return replace(run, checkpoint=(saved, replace(checkpoint_info(), **facts)))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    saved = write_checkpoint(tmp_path / "checkpoints")
    (saved.parent / "latest").write_text(saved.name)
    return saved


def test_the_first_lines_of_the_log(tmp_path: Path) -> None:
    lines = start_of_log(prepared(f"--load {tmp_path} --save {tmp_path}"))
    assert lines[0] == "this run"
    assert [line.split(maxsplit=1)[0] for line in lines[1:]] == [
        *("model", "ranks", "stages", "token", "schedule", "batch", "precision", "start")
    ]
    assert lines[-1].split() == ["start", "new", "weights"]


def test_texts_of_a_table_are_aligned() -> None:
    assert table({"a": "1", "long": "2"}) == ["  a     1", "  long  2"]


def test_expert_parallel_ranks_are_counted_once() -> None:
    experts = "--pipeline-model-parallel-size 1 --num-experts 4 --expert-model-parallel-size 2"
    shared = prepare(parse_arguments(f"{FLAGS.replace('--data-path unread', '--mock-data')} {experts}".split()), LAUNCH)
    assert rows_of_run(shared)["ranks"] == "2 = 2 data x 1 tensor x 1 pipeline parallel, 2 expert parallel"


def test_interleaved_with_one_stage_on_each_rank_is_1f1b() -> None:
    assert rows_of_run(prepared("--pipeline-schedule interleaved"))["schedule"].endswith(
        "it is 1f1b: add --num-model-chunks 2"
    )
    both = "--pipeline-schedule interleaved --num-model-chunks 2"
    assert "1f1b" not in rows_of_run(prepared(both))["schedule"]


def test_the_start_of_a_resumed_run(saved: Path) -> None:
    assert rows_of_run(resumed(prepared(), saved, iteration=5))["start"] == f"after iteration 5, from {saved}"
    imported = resumed(prepared(), saved, iteration=0)
    assert rows_of_run(imported)["start"] == f"iteration 0, with the weights of {saved}"


def test_warnings(saved: Path, tmp_path: Path) -> None:
    assert not warnings_of_run(prepared(f"--load {tmp_path} --save {tmp_path}/."))
    other_save = prepared(f"--save {saved.parent}")
    assert not warnings_of_run(resumed(other_save, saved))
    for run, part in (
        (prepared(f"--load {tmp_path}/typo --save {tmp_path}"), f"--load {tmp_path}/typo has no checkpoint"),
        (other_save, f"--save {saved.parent} has {saved.name} of an earlier run"),
        (resumed(prepared("--train-iters 5"), saved, iteration=5), "5 of 5 are done; raise --train-iters"),
        (
            resumed(prepared(), saved, tokenizer={"tokenizer_type": "NullTokenizer"}),
            "--tokenizer-type NullTokenizer, this run has byte",
        ),
    ):
        assert part in warnings_of_run(run)[-1]


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ("--lr 0.002", "--lr 0.01 (now 0.002)"),
        ("--override-opt-param-scheduler --min-lr 1e-4", "--min-lr 0.0 (now 0.0001)"),
        ("--use-checkpoint-opt-param-scheduler --lr-decay-style cosine", "--lr-decay-style 'linear' (now 'cosine')"),
        ("--train-iters 20 --decoupled-lr 0.1", "--decoupled-lr None (now 0.1), --lr-decay-iters 10 (now 20)"),
        ("--weight-decay 0.1 --lr-warmup-fraction 0.1", "--lr-warmup-iters 0 (now 1.0), --weight-decay 0.01 (now 0.1)"),
        ("--use-checkpoint-opt-param-scheduler --lr-decay-iters 10 --lr-warmup-fraction 0", ""),
        ("--seed 5 --global-batch-size 24", "--seed 1234 (now 5), --global-batch-size 2 (now 24)"),
        ("--split 9,1", "--split '969,30,1' (now '9,1')"),
    ],
)
def test_a_resumed_run_with_another_learning_rate_or_weight_decay(saved: Path, words: str, changed: str) -> None:
    schedule, run = prepared().compared_flags, prepared(words)
    line = f"warning: the checkpoint was trained with {changed}: the flags of this run are used"
    assert warnings_of_run(resumed(run, saved, iteration=5, optimizer_schedule=schedule)) == ([line] if changed else [])
    assert not warnings_of_run(resumed(run, saved, iteration=5))  # An earlier version did not keep it.
    assert not warnings_of_run(resumed(run, saved, iteration=0, consumed_samples=0, optimizer_schedule=schedule))


def test_a_vocabulary_far_larger_than_that_of_the_data() -> None:
    run = prepared("--vocab-size 50257")
    assert not warnings_of_run(run)  # Random tokens are drawn from all of it.
    data = replace(run.config.data, mock_data=False, data_path=("corpus",))
    (line,) = warnings_of_run(replace(run, config=replace(run.config, data=data)))
    assert "257 tokens of --tokenizer-type byte" in line and "50257 (--vocab-size)" in line


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ("--num-layers 5", "transformer layers 0-2, 3-4"),
        ("--num-layers 2", "transformer layers 0, 1"),
        ("--num-layers 3 --stage-partition 0,0,3", "transformer layers none, 0-2"),
        ("--num-layers 20 --num-model-chunks 5 --pipeline-schedule interleaved", "2 transformer layers each"),
    ],
)
def test_the_layers_of_each_stage(layers: str, words: str) -> None:
    assert rows_of_run(prepared(layers))["stages"].endswith(words)
