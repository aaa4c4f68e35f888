"""Lines at the start of a run: defaults that are not Megatron's. Flags without effect are in `test_flag_lists.py`."""

import pytest

from megatron_terapipe.arguments import flags, read_arguments
from megatron_terapipe.arguments.parser import OTHER_DEFAULTS

REQUIRED = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2 --train-iters 10 "
    "--lr 1e-3 --data-path corpus "
)
LINE = "These defaults are not those of Megatron, and no flag sets them: "


def lines(words: str) -> list[str]:
    return [line for line in read_arguments((REQUIRED + words).split()).notices if "defaults" in line]


@pytest.mark.parametrize(
    ("words", "differing"),
    [
        ("", "--hidden-dropout 0 (there 0.1), --attention-dropout 0 (there 0.1)"),
        ("--hidden-dropout 0 --log-interval 3", "--attention-dropout 0 (there 0.1)"),
        ("--hidden-dropout 0.1 --attention_dropout 0.1 --fp16", "--initial-loss-scale 65536 (there 2**32)"),
    ],
)
def test_defaults_that_train_differently_are_listed_where_no_flag_sets_them(words: str, differing: str) -> None:
    assert lines(words) == [LINE + differing]


@pytest.mark.parametrize("more", ["", "--fp16 --loss-scale 128", "--fp16 --initial-loss-scale 65536", "--bf16"])
def test_no_line_where_all_are_set(more: str) -> None:
    assert not lines(f"--hidden-dropout 0 --attention-dropout 0 {more}")


def test_they_differ_indeed() -> None:
    ours = {each.name: each.default for each in flags()}
    assert all(ours[each.field] != eval(each.theirs) for each in OTHER_DEFAULTS)  # noqa: S307 - our own table
