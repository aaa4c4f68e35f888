"""The small commands answer wrong words in one line, as the trainer does."""

from importlib import import_module

import pytest

COMMANDS = {
    "data.preprocess": ("--input x", "the following arguments are required: --output-prefix"),
    "data.corpus": ("--output x --limit-megabytes a", "argument --limit-megabytes: invalid float value: 'a'"),
    "generate": ("--load x --prompt a --top-q 1", "unrecognized arguments: --top-q 1: did you mean --top-p?"),
    "convert": ("to-huggingface --load x", "the following arguments are required: --output"),
    "neox.__main__": ("", "the following arguments are required: CONFIG"),
}


@pytest.mark.parametrize(("name", "case"), COMMANDS.items(), ids=COMMANDS)
def test_wrong_words_end_in_one_line(name: str, case: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    words, expected = case
    assert import_module(f"megatron_terapipe.{name}").main(words.split()) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith(f"error: {expected}")
    assert line.endswith((" --help", "?"))
    assert captured.out == ""
