"""`--json [FILE]` means the same in every command."""

import argparse
from collections.abc import Iterator

from deepspeed_ext.plan.terminal import STANDARD_OUTPUT, add_json_flag
from megatron_terapipe.command.main import tree


def parsers_below(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from parsers_below(each)


def test_every_command_takes_it_alike() -> None:
    found = {
        parser.prog: action
        for parser in parsers_below(tree("terapipe"))
        for action in parser._actions
        if "--json" in action.option_strings
    }
    assert {name.removeprefix("terapipe ") for name in found} == {
        *("plan", "report", "preprocess", "generate", "doctor"),
        *(f"convert {way}-{other}" for way in ("to", "from") for other in ("huggingface", "megatron")),
        *(f"search {name}" for name in ("rank", "predict", "slices", "measure", "trial", "validate")),
    }
    for name, action in found.items():
        assert (action.nargs, action.const, action.metavar) == ("?", STANDARD_OUTPUT, "FILE"), name
        assert "without FILE, or with -, print only that" in (action.help or ""), name


def test_its_values() -> None:
    parser = argparse.ArgumentParser()
    add_json_flag(parser, "the answer")
    for words, value in (([], None), (["--json"], "-"), (["--json", "-"], "-"), (["--json", "a.json"], "a.json")):
        assert parser.parse_args(words).json == value
