"""docs/reference/commands.md: the page about all commands."""

import re

import pytest

from docs.extensions.commands_page import markdown
from megatron_terapipe.command.commands import listed
from megatron_terapipe.command.completion import actions_of
from megatron_terapipe.command.main import parsers
from tests.architecture.sources import ROOT

PAGE = ROOT / "docs" / "reference" / "commands.md"


@pytest.mark.parametrize("columns", ["40", "200"])
def test_the_page_is_fresh_whatever_the_width_of_the_terminal(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert PAGE.read_text(encoding="utf-8") == markdown(), "run `make reference`"


def test_it_has_every_command_and_every_flag_of_its_help() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"### `terapipe {name}`\n" in text for commands in listed().values() for name, _ in commands)
    flags = {
        name
        for _, parser in parsers("terapipe")
        for action in actions_of(parser)
        if action.help != "==SUPPRESS=="
        for name in action.option_strings
    }
    assert {name for name in flags - {"-h", "--help"} if f"`{name}`" not in text} == set()


def test_links_lead_to_documents() -> None:
    links = re.findall(r"\]\(([^)]+)\)", PAGE.read_text(encoding="utf-8"))
    assert len(links) > 5
    assert [link for link in links if not (PAGE.parent / link).is_file()] == []
