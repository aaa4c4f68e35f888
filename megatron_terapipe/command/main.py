"""The entry of `terapipe`: the table of all commands, the text of `terapipe --help`, and the run of a command.

A command is one line here, and a module with two functions:

    build_parser(prog: str) -> argparse.ArgumentParser       its flags; `prog` is the command as users type it
    main(argv: Sequence[str] | None, prog: str) -> int       runs it, and returns the exit code

The module is imported when its command is called, so that no command waits for packages of another.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.terminal import BAD_INPUT, CommandParser, nearest, run_command


class Command(NamedTuple):
    """A command of `terapipe`."""

    name: str
    summary: str
    """Its purpose, in one line without a full stop."""
    module: str
    parts: tuple["Command", ...] = ()
    """Commands of its own, called by a second word."""


SEARCH = Command(
    "search",
    "find out how to train a model on a cluster: a strategy, its time and its memory",
    "megatron_terapipe.search.__main__",
    tuple(
        Command(name, summary, f"megatron_terapipe.search.answer.{name}_command")
        for name, summary in (
            ("rank", "find the best strategies of a model on a cluster, and explain why"),
            ("predict", "predict time and memory of strategies that you name"),
            ("slices", "find the best token slices of one strategy"),
            ("measure", "measure ops and links of this machine, for --profile"),
            ("trial", "run the best strategies, record them, and calibrate"),
            ("validate", "compare predictions with measured trials"),
        )
    ),
)


def _command(name: str, module: str, summary: str) -> Command:
    return Command(name, summary, f"megatron_terapipe.{module}")


GROUPS: dict[str, tuple[Command, ...]] = {
    "train": (
        _command("train", "command.train", "train a GPT, here or on the hosts of a hostfile"),
        _command("report", "run_report.__main__", "write the report of training runs"),
    ),
    "plan": (
        Command(
            "plan", "simulate a pipeline schedule, draw it, and compute its idle time", "deepspeed_ext.plan.command"
        ),
        SEARCH,
    ),
    "data and models": (
        _command("preprocess", "data.preprocess", "turn a file of texts into the data files of a run"),
        _command("convert", "convert", "convert models to and from the files of Hugging Face"),
        _command("generate", "generate", "continue a text with a trained model"),
        _command("neox", "neox.__main__", "turn files of GPT-NeoX into a command that trains the same model"),
    ),
    "machines": (
        _command(
            "doctor", "doctor.__main__", "find the faults of this machine, or of the hosts of a hostfile, before a run"
        ),
    ),
    "shells and scripts": (
        _command("schema", "command.schema", "print the JSON Schema of a file that you write"),
        _command("completion", "command.completion", "print a script with which bash or zsh completes all this"),
    ),
}
"""All commands by group, in the order of `terapipe --help`."""

COMMANDS = {command.name: command for commands in GROUPS.values() for command in commands}

SUMMARY = "Train GPTs whose sequences are pipelined in token slices; plan such runs; prepare data and models for them."

OVERVIEW = """\
{summary}

usage: {prog} COMMAND [flags]
{commands}

flags:
  {help:<{width}}  show this text; with a command, show its flags
  {version:<{width}}  print the versions of this project, Python, torch and DeepSpeed

examples:
  {prog} search rank llama2-7b hostfile --device A100-80GB --global-batch-size 64
  {prog} train --hostfile hostfile --model-preset llama2-7b --seq-length 4096 ...
  {prog} generate --help

read on: README.md, docs/index.md; all flags of a command: terapipe COMMAND --help
"""


def listed() -> dict[str, list[tuple[str, str]]]:
    """Return the commands of each group: the words that call one, and its summary."""
    return {
        title: [
            line
            for each in commands
            for line in ([(f"{each.name} {part.name}", part.summary) for part in each.parts] or [each[:2]])
        ]
        for title, commands in GROUPS.items()
    }


def overview(prog: str) -> str:
    """Return the help of the command as a whole; `prog` is the command as users type it."""
    width = max(len(name) for commands in listed().values() for name, _ in commands)
    lines = []
    for title, commands in listed().items():
        lines += ["", f"{title}:", *(f"  {name:<{width}}  {summary}" for name, summary in commands)]
    flags = {"help": "-h, --help", "version": "--version"}
    return OVERVIEW.format(summary=SUMMARY, prog=prog, commands="\n".join(lines), width=width, **flags)


Builder = Callable[[str], CommandParser]


def parsers(prog: str) -> Iterator[tuple[str, CommandParser]]:
    """Yield the parser of each command with its name; `prog` is the program as users type it."""
    for name, command in COMMANDS.items():
        yield name, import_module(command.module).build_parser(f"{prog} {name}")


def tree(prog: str) -> CommandParser:
    """Return one parser whose sub-commands are all commands, with every flag; `prog` is its name for users."""
    parser = CommandParser(prog=prog, description=SUMMARY)
    parser.add_argument("--version", action="version", version="", help="print versions")
    commands: Any = parser.add_subparsers(metavar="COMMAND", parser_class=lambda prog, build: build(prog))  # type: ignore[call-overload]
    for name, command in COMMANDS.items():
        module = import_module(command.module)
        # The help of some shows a part of their flags.
        build: Builder = getattr(module, "whole_parser", module.build_parser)
        commands.add_parser(name, help=command.summary, build=build)
    return parser


PROGRAM = "terapipe"


def main(argv: Sequence[str] | None = None, prog: str = PROGRAM) -> int:
    """Run a command and return its exit code: 2 for bad input, reported in one line."""
    words = sys.argv[1:] if argv is None else list(argv)
    return run_command(lambda: _run(words, prog))


def _run(words: list[str], prog: str) -> int:
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    if not words:
        print(overview(prog), end="", file=sys.stderr)
        return BAD_INPUT
    name, *rest = words
    if name in ("-h", "--help"):
        print(overview(prog), end="")
        return 0
    if name == "--version":
        print(*versions(), sep="\n")
        return 0
    if name not in COMMANDS:
        raise UserError(f"{name} is not a command: {_remedy(name, prog)}")
    return int(import_module(COMMANDS[name].module).main(rest, f"{prog} {name}"))


def _remedy(name: str, prog: str) -> str:
    """Return the remedy for an unknown command: the nearest name, also one of the commands with two words."""
    parts = {part.name: f"{command.name} {part.name}" for command in COMMANDS.values() for part in command.parts}
    meant = parts.get(name) or nearest(name, COMMANDS) or parts.get(nearest(name, parts) or "")
    return f"did you mean {prog} {meant}?" if meant else f"see {prog} --help"


def versions() -> Iterator[str]:
    """Yield the versions of this project, torch, DeepSpeed and Python, a line each, without loading any of them."""
    # Imported here: only this needs it.
    from importlib.metadata import PackageNotFoundError, version

    for name in ("megatron-terapipe", "torch", "deepspeed"):
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            yield f"{name} is not installed"
    yield f"python {sys.version.split()[0]}"
