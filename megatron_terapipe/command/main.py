"""The entry of `terapipe`: finds the command that the words name, and runs it; and the parsers of all commands."""

import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.terminal import BAD_INPUT, CommandParser, nearest, run_command
from megatron_terapipe.command.commands import COMMANDS, SUMMARY, overview

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
