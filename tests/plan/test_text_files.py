"""Text and JSON of users; refusals are in test_refusals."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from deepspeed_ext.plan.errors import MOST_CHARACTERS, UserError
from deepspeed_ext.plan.text_files import parse_json, read_text, write_text


def test_values_come_back() -> None:
    assert parse_json('{"a": [1, 2.5, null, true, "\\ud83d\\ude00"]}', "f") == {"a": [1, 2.5, None, True, "😀"]}


def test_whole_numbers_without_bound() -> None:
    assert parse_json(f"[{10**30}]", "f", unbounded=True) == [10**30]


def test_messages_are_one_line() -> None:
    assert str(UserError("--save a\nb\x1b[2J\ud800 é: name another")) == "--save a\\nb\\x1b[2J\\ud800 é: name another"
    assert str(UserError(str(UserError("a\nb")))) == "a\\nb"
    long = str(UserError("--lr " + "9" * 1_000_000 + ": give less"))
    assert len(long) < MOST_CHARACTERS + 100 and long.endswith("9: give less") and "left out" in long
    escaped = str(UserError("--save " + "\ud800" * 5000))
    assert len(escaped) < MOST_CHARACTERS + 100
    assert str(UserError(escaped)).count("left out") <= 2


def test_text_comes_back_without_the_mark_of_spreadsheets(tmp_path: Path) -> None:
    write_text(tmp_path / "f", "\ufeffä\n")
    assert read_text(tmp_path / "f") == "ä\n"


def test_the_text_of_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    parts = ["a\r\n" * 50_000, "b"]

    def write() -> None:
        with pipe.open("w", newline="") as file:
            for part in parts:
                file.write(part)
                file.flush()

    with ThreadPoolExecutor() as pool:
        writer = pool.submit(write)
        assert read_text(pipe) == "a\n" * 50_000 + "b"
        writer.result()
