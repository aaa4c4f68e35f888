"""A run says how it starts, and warns where that is perhaps not what was meant."""

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


def going_on(run: Run, saved: Path, **facts: object) -> Run:
    """Return the run as it goes on from a checkpoint that fits it."""
    return replace(run, checkpoint=(saved, replace(checkpoint_info(), **facts)))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    saved = write_checkpoint(tmp_path / "checkpoints")
    (saved.parent / "latest").write_text(saved.name)
    return saved


def test_the_log_starts_with_what_runs(tmp_path: Path) -> None:
    lines = start_of_log(prepared(f"--load {tmp_path} --save {tmp_path}"))
    assert lines[0] == "this run"
    assert [line.split(maxsplit=1)[0] for line in lines[1:]] == [
        *("model", "ranks", "stages", "token", "schedule", "batch", "precision", "start")
    ]
    assert lines[-1].split() == ["start", "new", "weights"]


def test_texts_of_a_table_stand_below_each_other() -> None:
    assert table({"a": "1", "long": "2"}) == ["  a     1", "  long  2"]


def test_interleaved_with_one_stage_on_each_rank_is_told_to_be_1f1b() -> None:
    assert rows_of_run(prepared("--pipeline-schedule interleaved"))["schedule"].endswith(
        "it is 1f1b: add --num-model-chunks 2"
    )
    both = "--pipeline-schedule interleaved --num-model-chunks 2"
    assert "1f1b" not in rows_of_run(prepared(both))["schedule"]


def test_a_path_that_holds_no_checkpoint_is_told_unless_the_run_saves_there(tmp_path: Path) -> None:
    assert not warnings_of_run(prepared(f"--load {tmp_path} --save {tmp_path}/."))
    (line,) = warnings_of_run(prepared(f"--load {tmp_path}/typo --save {tmp_path}"))
    assert line.startswith(f"warning: --load {tmp_path}/typo holds no checkpoint, and training starts from new weights")


def test_checkpoints_of_another_run_in_the_way_are_told(saved: Path) -> None:
    run = prepared(f"--save {saved.parent}")
    (line,) = warnings_of_run(run)
    assert line.startswith(f"warning: --save {saved.parent} holds {saved.name} of an earlier run")
    assert not warnings_of_run(going_on(run, saved))


def test_what_it_goes_on_from_is_told(saved: Path) -> None:
    run = going_on(prepared(), saved, iteration=5)
    assert rows_of_run(run)["start"] == f"after iteration 5, from {saved}"
    imported = going_on(prepared(), saved, iteration=0)
    assert rows_of_run(imported)["start"] == f"iteration 0, with the weights of {saved}"


def test_a_run_that_is_done_and_another_tokenizer_are_told(saved: Path) -> None:
    done = going_on(prepared("--train-iters 5"), saved, iteration=5)
    assert warnings_of_run(done)[-1].startswith("nothing is left to train: 5 of 5 iterations are done; raise --train-")
    (line,) = warnings_of_run(going_on(prepared(), saved, tokenizer={"tokenizer_type": "NullTokenizer"}))
    assert line.startswith("warning: the checkpoint was trained with --tokenizer-type NullTokenizer, this run has byte")


def test_a_vocabulary_far_beyond_that_of_the_data_is_told() -> None:
    run = prepared("--vocab-size 50257")
    assert not warnings_of_run(run)  # Random tokens are drawn from all of it.
    data = replace(run.config.data, mock_data=False, data_path=("corpus",))
    (line,) = warnings_of_run(replace(run, config=replace(run.config, data=data)))
    assert line == (
        "warning: the data has the 257 tokens of --tokenizer-type byte, and the model 50257 (--vocab-size): most of "
        "them are never trained; give the tokenizer of the model if it has one"
    )


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ("--num-layers 5", "transformer layers 0-2, 3-4"),
        ("--num-layers 2", "transformer layers 0, 1"),
        ("--num-layers 20 --num-model-chunks 5 --pipeline-schedule interleaved", "2 transformer layers each"),
    ],
)
def test_the_layers_of_each_stage_are_told(layers: str, words: str) -> None:
    assert rows_of_run(prepared(layers))["stages"].endswith(words)
