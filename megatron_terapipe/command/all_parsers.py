"""The parsers of all commands: of each by itself, and as one tree for what completes words in a shell."""

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from deepspeed_ext.plan.text.command_line import CommandParser
from megatron_terapipe.command.commands import COMMANDS, GROUPS, Command, Group
from megatron_terapipe.command.overview import SUMMARY

Builder = Callable[[str], CommandParser]


def parsers(prog: str) -> Iterator[tuple[Group, Command, CommandParser]]:
    """Yield each command with its group and its parser; `prog` is what people type before its name."""
    for group in GROUPS:
        for command in group.commands:
            yield group, command, import_module(command.module).build_parser(f"{prog} {command.name}")


def tree(prog: str) -> CommandParser:
    """Return one parser whose sub-commands are all commands, with every flag; `prog` is what people type."""
    parser = CommandParser(prog=prog, description=SUMMARY)
    parser.add_argument("--version", action="version", version="", help="print versions")
    commands: Any = parser.add_subparsers(metavar="COMMAND", parser_class=_built)  # type: ignore[call-overload]
    for name, command in COMMANDS.items():
        module = import_module(command.module)
        # The help of some shows a part of their flags.
        build: Builder = getattr(module, "whole_parser", module.build_parser)
        commands.add_parser(name, help=command.summary, build=build)
    return parser


def _built(prog: str, build: Builder) -> CommandParser:
    return build(prog)
