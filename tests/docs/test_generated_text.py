"""Pages whose tables are printed from the code when the site is built."""

import re

import pytest

from docs.extensions import commands_page, flags_page
from docs.extensions.generated_text import PRINTERS
from megatron_terapipe.arguments import flags
from megatron_terapipe.command.completion import actions_of
from megatron_terapipe.command.main import listed, parsers
from megatron_terapipe.config.options import flag
from tests.architecture.sources import ROOT

REFERENCE = ROOT / "docs" / "reference"


def test_each_text_has_a_page() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in REFERENCE.glob("*.md"))
    assert sorted(re.findall(r"^<!-- generated: (\w+) -->$", pages, re.MULTILINE)) == sorted(PRINTERS)


def test_every_flag_of_the_trainer_is_shown() -> None:
    text = flags_page.markdown()
    assert [each.name for each in flags() if f"`{flag(each.name)}`" not in text] == []


def test_every_command_and_every_flag_of_its_help_is_shown() -> None:
    text = commands_page.markdown()
    assert all(f"### `terapipe {name}`\n" in text for commands in listed().values() for name, _ in commands)
    shown = {
        name
        for _, parser in parsers("terapipe")
        for action in actions_of(parser)
        if action.help != "==SUPPRESS=="
        for name in action.option_strings
    }
    assert {name for name in shown - {"-h", "--help"} if f"`{name}`" not in text} == set()


def test_the_commands_do_not_depend_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    narrow = commands_page.markdown()
    monkeypatch.setenv("COLUMNS", "200")
    assert commands_page.markdown() == narrow


def test_links_lead_to_documents() -> None:
    links = re.findall(r"\]\(([^)]+)\)", commands_page.markdown())
    assert len(links) > 5
    assert [link for link in links if not (REFERENCE / link).is_file()] == []
