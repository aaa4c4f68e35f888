"""`--use-checkpoint-args`: the model of the checkpoint."""

from dataclasses import replace
from pathlib import Path

import pytest

from deepspeed_ext.plan.errors import UserError
from megatron_terapipe.arguments import parse_arguments
from tests.inference.checkpoints import MODEL, checkpoint_info, write_checkpoint, write_info

REST = "--micro-batch-size 1 --lr 1e-3 --train-iters 5 --data-path unread".split()


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path)
    return tmp_path


def model_of(checkpoints: Path, *more: str):
    return parse_arguments([*REST, "--load", str(checkpoints), *more]).model


def test_flags_and_checkpoints_set_the_model(checkpoints: Path) -> None:
    older = checkpoint_info(iteration=3)
    older.model.update(hidden_size=64, kv_channels=16)
    write_info(older, checkpoints / "global_step3")
    ids = checkpoint_info(iteration=4)
    ids.tokenizer.update(tokenizer_type="NullTokenizer", vocab_size=MODEL.vocab_size - 1)
    write_info(ids, checkpoints / "global_step4")
    older_model = replace(MODEL, hidden_size=64, kv_channels=16)
    for flags, expected in (
        ("--use-checkpoint-args", MODEL),
        ("--use-checkpoint-shape", MODEL),
        ("--use-checkpoint-args --seq-length 16", replace(MODEL, seq_length=16)),
        ("--use-checkpoint-args --ckpt-step 3", older_model),
        ("--use-checkpoint-args --ckpt-step 4 --tokenizer-type NullTokenizer", MODEL),
    ):
        assert model_of(checkpoints, *flags.split()) == expected, flags


def test_the_positions_of_an_imported_model_are_no_length_of_sequences(checkpoints: Path) -> None:
    imported = replace(checkpoint_info(iteration=0), family="llama")
    write_info(imported, checkpoints / "global_step0")
    with pytest.raises(UserError, match="--seq-length must be given: add it"):
        model_of(checkpoints, "--use-checkpoint-args", "--load-tag", "global_step0")
    found = model_of(checkpoints, "--use-checkpoint-args", "--load-tag", "global_step0", "--seq-length", "16")
    assert (found.seq_length, found.max_position_embeddings) == (16, 40)
    write_info(replace(imported, iteration=3, consumed_samples=24), checkpoints / "global_step3")
    assert model_of(checkpoints, "--use-checkpoint-args", "--ckpt-step", "3").seq_length == MODEL.seq_length


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--use-checkpoint-args"], "--use-checkpoint-args has no effect without --load"),
        (["--load", "nowhere", "--use-checkpoint-args"], "--load nowhere holds no checkpoint"),
        (["--load-tag", "a"], "--load-tag a has no effect without --load"),
        (["--ckpt-step", "3"], "--ckpt-step 3 has no effect without --load"),
        (["--load", "a", "--ckpt-step", "3", "--load-tag", "b"], "--load-tag b and --ckpt-step 3 exclude each other"),
        (["--keep-last-n-checkpoints", "2"], "--keep-last-n-checkpoints 2 has no effect without --save"),
        (["--save", "a", "--keep-last-n-checkpoints", "0"], "--keep-last-n-checkpoints 0"),
    ],
)
def test_flags_that_cannot_be_followed(flags: list[str], said: str) -> None:
    sizes = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32".split()
    with pytest.raises(UserError) as caught:
        parse_arguments([*REST, *sizes, *flags])
    assert said in str(caught.value)
