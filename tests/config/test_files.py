"""Files that are read and written: data, checkpoints, timelines, and names of hosts."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from deepspeed_ext.plan.errors import UserError
from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.config import CheckpointConfig, DataConfig
from megatron_terapipe.config.logging import LoggingConfig
from megatron_terapipe.config.parsing import check_host_name, is_host_name
from megatron_terapipe.errors import ConfigError

MODEL = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --vocab-size 300 --micro-batch-size 1"
    " --train-iters 3 --lr 1e-3"
)


def parse(words: str) -> DataConfig:
    return parse_arguments(f"{MODEL} {words}".split()).data


def test_one_body_of_data_is_split() -> None:
    data = DataConfig(data_path=("0.3", "a", "0.7", "b"))
    assert data.split == "969,30,1"
    assert data.split_shares() == pytest.approx((0.969, 0.03, 0.001))
    for part in ("train", "valid", "test"):
        assert data.weighted_prefixes(part) == ((0.3, "a"), (0.7, "b"))
    assert data.has("valid")
    assert not DataConfig(data_path=("a",), split="1").has("valid")
    for split, shares in {"'3,1,0'": (0.75, 0.25, 0.0), "3,1": (0.75, 0.25, 0.0), "100": (1.0, 0.0, 0.0)}.items():
        assert DataConfig(data_path=("a",), split=split).split_shares() == shares


def test_parts_may_have_data_of_their_own() -> None:
    data = parse("--train-data-path 1 a 3 b --valid_data_path c d")
    assert (data.split, data.split_shares()) == (None, None)
    assert data.weighted_prefixes("train") == ((1.0, "a"), (3.0, "b"))
    assert data.weighted_prefixes("valid") == ((None, "c"), (None, "d"))
    assert data.weighted_prefixes("test") == ()
    assert data.has("valid")
    assert not parse("--train-data-path a --test-data-path b").has("valid")


def test_files_of_long_blends(tmp_path: Path) -> None:
    words, by_part = tmp_path / "blend.txt", tmp_path / "parts.json"
    words.write_text("0.3 wiki\n0.7 books\n")
    assert parse(f"--data-args-path {words}").weighted_prefixes() == ((0.3, "wiki"), (0.7, "books"))
    by_part.write_text('{"train": "0.3 wiki 0.7 books", "valid": [1, "news", 2.5, "web"], "test": null}')
    data = parse(f"--per-split-data-args-path {by_part}")
    assert data.weighted_prefixes("train") == ((0.3, "wiki"), (0.7, "books"))
    assert data.weighted_prefixes("valid") == ((1.0, "news"), (2.5, "web"))
    assert not data.has("test")
    assert replace(data, num_workers=2).train_data_path == data.train_data_path


@pytest.mark.parametrize(
    ("flag", "text", "line"),
    [
        ("--data-args-path", "", "--data-args-path FILE is empty"),
        ("--data-args-path", "0.3 wiki books", "--data-path 0.3 wiki books "),
        ("--data-path a --data-args-path", "b", "--data-path a contradicts --data-args-path"),
        ("--per-split-data-args-path", "{", "FILE is not JSON"),
        ("--per-split-data-args-path", '{"valid": "a"}', "FILE is not an object with the keys train, valid and test"),
        ("--per-split-data-args-path", '{"train": "a", "validation": "b"}', "FILE is not an object with the keys"),
        ("--per-split-data-args-path", '{"train": {"a": 1}}', "FILE: train is neither a string nor a list"),
        ("--train-data-path b --per-split-data-args-path", '{"train": "a"}', "--train-data-path b contradicts"),
        ("--data-path b --per-split-data-args-path", '{"train": "a"}', "--data-path divides one body of data"),
    ],
)
def test_files_of_prefixes_are_checked(flag: str, text: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / "named"
    path.write_text(text)
    with pytest.raises(UserError, match=line.replace("FILE", re.escape(str(path)))):
        parse(f"{flag} {path}")


def test_checkpoints_that_are_due() -> None:
    every = CheckpointConfig(save="x", save_interval=4, extra_save_iterations=(0, 3, 4))
    assert [done for done in range(10) if every.saves_after(done)] == [0, 3, 4, 8]
    assert not any(CheckpointConfig(save="x").saves_after(done) for done in range(10))
    assert not CheckpointConfig(save="x", save_interval=4).saves_after(0)


@pytest.mark.parametrize(
    ("start", "last", "text", "measured"),
    [
        # By default a few after the first of this run; numbers that are given count from the start of training.
        *((0, 10, None, {3, 4, 5}), (100, 200, None, {103, 104, 105}), (0, 4, None, {3, 4})),
        *((0, 2, None, {2}), (7, 8, None, {8}), (100, 200, "150", {150})),
        *((0, 20, "10", {10}), (0, 20, "4,2", {2, 4}), (0, 20, "3-5", {3, 4, 5}), (0, 20, "9, 2-3", {2, 3, 9})),
        (0, 20, "1-3,2-4", {1, 2, 3, 4}),
    ],
)
def test_measured_iterations(start: int, last: int, text: str | None, measured: set[int]) -> None:
    runs = LoggingConfig(timeline="out", timeline_iterations=text).measured_iterations(start, last)
    assert {iteration for run in runs for iteration in run} == measured
    assert runs[-1][-1] == max(measured)


@pytest.mark.parametrize(
    "name",
    [
        *("a", "worker-0", "node_7", "gpu01.cluster.example.com", "example.com.", "10.0.0.1", "7"),
        *("::1", "fe80::1%eth0", "2001:db8::7", "user@host", "first.last@10.0.0.1", "a" * 63),
    ],
)
def test_names_and_addresses(name: str) -> None:
    assert check_host_name(name, "hostfile") == name


@pytest.mark.parametrize(
    "name",
    [
        # Options of ssh and pdsh; two of them run a command.
        *("-oProxyCommand=touch${IFS}x", "-R", "-", "user@-oProxyCommand=x", "-l@host"),
        # Words that pdsh reads as another module, a file of hosts, a list, a pattern, or a host to leave out.
        *("exec:a", "^hosts", "a[0-3]", "/a/", "a,b", "a%n"),
        # Characters of shells.
        *("a\nid", "a b", *"a;id a|id a&id $(id) `id` a'b a\"b a\\b ~a a>b * a#b {a,b}".split()),
        *("fe80::1%;id", "[::1]", "a..b", ".a", "", "@", "user@", "@host", "a@b@c", "a-", "é"),
        *("a" * 64, "a." * 130),
    ],
)
def test_words_that_are_no_host_names(name: str) -> None:
    assert not is_host_name(name)
    with pytest.raises(ConfigError, match="is not a host name") as caught:
        check_host_name(name, "hosts: line 1")
    assert "\n" not in str(caught.value)
