"""`terapipe`: its help, its commands, and how every command ends."""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from itertools import chain
from pathlib import Path

import pytest

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.terminal import CommandParser, run_command
from megatron_terapipe.arguments.parser import read_command_line
from megatron_terapipe.command import main as main_module
from megatron_terapipe.command.main import COMMANDS, GROUPS, listed, main, parsers, versions
from megatron_terapipe.command.train import split
from tests.architecture.sources import ROOT, modules

WIDE = 120


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run a command that must fail on its input, and return its one line."""
    assert main(words) == 2
    shown = capsys.readouterr()
    assert not shown.out
    assert shown.err.startswith("error: ") and shown.err.count("\n") == 1
    return shown.err.removeprefix("error: ").rstrip("\n")


# Help


def test_help_is_the_golden_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    golden = Path(__file__).with_name("help.txt")
    assert shown == golden.read_text(encoding="utf-8"), f"read it, then: terapipe --help > {golden.relative_to(ROOT)}"
    assert all(len(line) <= WIDE for line in shown.splitlines())
    for name, summary in chain.from_iterable(listed().values()):
        assert f"\n  {name:<15}  {summary}\n" in shown and summary[0].islower() and not summary.endswith(".")
    # Without a command the same text is an error.
    assert main([]) == 2
    assert capsys.readouterr() == ("", shown)


@pytest.mark.parametrize("words", [["help", "plan"], ["plan", "--help"]])
def test_help_of_a_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Simulate a pipeline schedule")
    assert "usage: terapipe plan [flags]" in lines


# The table


@pytest.mark.parametrize("name", COMMANDS)
def test_modules_of_the_table_have_their_functions(name: str) -> None:
    module = import_module(COMMANDS[name].module)
    parser = module.build_parser(f"terapipe {name}")
    assert isinstance(parser, CommandParser)
    assert callable(module.main)
    text = parser.format_help()
    assert not text.startswith("usage"), "the first line is the purpose of the command"
    assert "examples:" in text
    assert f"usage: terapipe {name}" in text


def with_parts(parser: CommandParser) -> Iterator[CommandParser]:
    """The parser and those of its sub-commands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from chain.from_iterable(map(with_parts, action.choices.values()))


def test_examples_of_help_texts_have_good_flags() -> None:
    tried = 0
    for name, parser in parsers(main_module.PROGRAM):
        for each in with_parts(parser):
            text = (each.epilog or "").replace("%(prog)s", each.prog).replace("\\\n", " ")
            examples = [line for line in text.splitlines() if line.startswith(f"  {each.prog} ")]
            assert examples or each is not parser, f"{each.prog} has no example"
            for line in examples:
                words = shlex.split(line.partition(" > ")[0], comments=True)[len(each.prog.split()) :]
                if name == "train":
                    read_command_line([word for word in split(words)[1] if word != "..."])
                else:
                    # NeoX's words stand in any order.
                    (each.parse_intermixed_args if name == "neox" else each.parse_args)(words)
                tried += 1
    assert tried > 25


def test_names_are_there_once_and_modules_exist() -> None:
    commands = [command for group in GROUPS.values() for command in group]
    every = [*commands, *(part for command in commands for part in command.parts)]
    assert len(COMMANDS) == len(commands)
    assert all(command.module in modules() for command in every)


# Wrong words


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("trian", "trian is not a command: did you mean terapipe train?"),
        ("Train", "Train is not a command: did you mean terapipe train?"),
        ("rank", "rank is not a command: did you mean terapipe search rank?"),
        ("qqqqqq", "qqqqqq is not a command: see terapipe --help"),
        ("search rnk", "command 'rnk' is not known: did you mean rank?"),
        ("plan --schedul 1f1b", "unrecognized arguments: --schedul 1f1b: did you mean --schedule?"),
        ("convert to-huggingface", "the following arguments are required: --load, --output: see terapipe convert to-h"),
        (
            "preprocess --input x",
            "the following arguments are required: --output-prefix: see terapipe preprocess --help",
        ),
        ("generate --load x --prompt a --top-q 1", "unrecognized arguments: --top-q 1: did you mean --top-p?"),
        ("neox", "the following arguments are required: CONFIG: see terapipe neox --help"),
    ],
)
def test_errors_name_the_nearest_word(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, *words.split()).startswith(message)


def test_versions_are_those_installed() -> None:
    lines = list(versions())
    assert [line.split()[0] for line in lines] == ["megatron-terapipe", "torch", "deepspeed", "python"]
    assert lines[-1] == f"python {sys.version.split()[0]}"


# How commands end


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("x: y"), 2, "error: x: y"),
        (OSError(28, "No space left on device"), 2, "error: [Errno 28] No space left on device"),
        (KeyboardInterrupt(), 130, "interrupted"),
        # Faults of ours keep their traceback.
        (AssertionError(), 1, ""),
    ],
)
def test_failures_are_one_line(error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    def action() -> int:
        raise error

    if code == 1:
        with pytest.raises(AssertionError):
            run_command(action)
        return
    assert run_command(action) == code
    assert capsys.readouterr().err == f"{line}\n"


@pytest.mark.parametrize("words", [["--help"], ["plan", "--help"]])
def test_a_closed_pipe_ends_a_command_quietly(words: list[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_terapipe", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    # argparse ignores that its help was not read.
    assert process.wait(timeout=60) == ("plan" not in words)
