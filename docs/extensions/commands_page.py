"""The tables of the page `docs/reference/commands.md`: every command with its flags, made from the parsers."""

import argparse
import re
from collections.abc import Iterator
from itertools import groupby

from deepspeed_ext.plan.terminal import CommandParser
from megatron_terapipe.command.main import GROUPS, listed, parsers

PROGRAM = "terapipe"

DOCUMENT = re.compile(r"docs/([\w/.-]+\.md)")
"""A document, as help texts name it."""


def markdown() -> str:
    """Return a table of all commands, and a section for each."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield from ("| command | effect |", "|---|---|")
    for title, commands in listed().items():
        yield f"| **{title}** | |"
        yield from (f"| `{PROGRAM} {name}` | {summary} |" for name, summary in commands)
    parser_of = dict(parsers(PROGRAM))
    for title, of_group in GROUPS.items():
        yield from ("", f"## {title[0].upper()}{title[1:]}")
        for command in of_group:
            yield from _command(parser_of[command.name])


def _command(parser: CommandParser) -> Iterator[str]:
    yield from ("", f"### `{parser.prog}`", "")
    yield from _text(parser, parser.description)
    yield from ("", "```text", parser.format_usage().removeprefix("usage: ").rstrip(), "```")
    parts: dict[str, CommandParser] = {}
    for group in parser._action_groups:
        flags = []
        for action in group._group_actions:
            if isinstance(action, argparse._SubParsersAction):
                parts |= action.choices
            elif action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction):
                flags.append(action)
        if flags:
            yield from ("", f"| {group.title or ''} | |", "|---|---|")
            yield from (_row(parser, action) for action in flags)
    if parser.epilog:
        yield ""
        yield from _text(parser, parser.epilog)
    for part in parts.values():
        yield from _command(part)


def _row(parser: CommandParser, action: argparse.Action) -> str:
    formatter = parser._get_formatter()
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    value = "" if action.nargs == 0 else formatter._format_args(action, action.dest)
    shown = f"{names} `{value}`" if names and value else names or f"`{value}`"
    return f"| {_escaped(shown)} | {_escaped(_linked(formatter._expand_help(action)))} |"


def _text(parser: CommandParser, text: str | None) -> Iterator[str]:
    """Yield the lines of a description or an epilog: paragraphs as they are, indented lines in fences."""
    lines = (text or "").strip("\n").replace("%(prog)s", parser.prog).splitlines()
    for indented, block in groupby(lines, key=lambda line: line.startswith("  ")):
        if indented:
            yield from ("", "```text", *(line[2:] for line in block), "```")
        else:
            yield from map(_linked, block)


def _linked(text: str) -> str:
    """Return a text with links to the documents that it names."""
    return DOCUMENT.sub(lambda found: f"[{found[0]}]({_beside(found[1])})", text)


def _beside(path: str) -> str:
    return path.removeprefix("reference/") if path.startswith("reference/") else f"../{path}"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
