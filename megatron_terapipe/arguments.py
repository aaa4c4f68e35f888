"""Command-line flags of the trainer, derived from the sections of `Config`.

A flag is a field: its name, type, default, choices and docstring are those of the field, so a flag cannot lack its
help and a field cannot lack its flag. `python -m megatron_terapipe.arguments` prints `docs/arguments.md`.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from megatron_terapipe.config import Config
from megatron_terapipe.config.options import Option, choices_of, field_help, flag, option_of
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.refused_flags import REFUSED_FLAGS
from megatron_terapipe.strategy import read_strategy_settings

PROGRAM = "pretrain_gpt.py"
METAVARS = {int: "N", float: "X", str: "NAME"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """One flag, as its field describes it."""

    section: str
    """Field of `Config` that holds the section."""

    name: str
    """Field of the section."""

    kind: type[Any]
    """Type of one value: int, float, str or bool."""

    repeated: bool
    """Whether it takes several values."""

    default: object
    """Default of the field; MISSING if the flag is required."""

    choices: tuple[str | int, ...]
    """Values accepted; empty if any of the type."""

    help: str
    """What the flag is for."""

    option: Option
    """Other spellings, and what the field cannot say."""

    @property
    def metavar(self) -> str:
        """Name of the value in the help text."""
        if self.choices:
            return "{" + ",".join(map(str, self.choices)) + "}"
        return self.option.metavar or METAVARS.get(self.kind, "")

    @property
    def default_text(self) -> str:
        """Default in words; empty if it needs none."""
        if self.option.derived:
            return self.option.derived
        if self.default is MISSING:
            return "required"
        return "" if self.default is None or self.kind is bool else f"{self.default}"


def flags() -> Iterator[Flag]:
    """Every flag, section by section."""
    for section, section_class in get_type_hints(Config).items():
        hints, texts = get_type_hints(section_class), field_help(section_class)
        for declared in fields(section_class):
            kind, repeated = _value_type(hints[declared.name])
            yield Flag(
                section=section,
                name=declared.name,
                kind=kind,
                repeated=repeated,
                default=declared.default,
                choices=choices_of(section_class, declared),
                help=texts[declared.name],
                option=option_of(declared),
            )


def parse_arguments(argv: Sequence[str] | None = None) -> Config:
    """Read the command line, and the strategy file if it names one.

    Args:
        argv: words after the name of the program; None = those of this process.

    Raises:
        ConfigError: if a flag or a value is wrong; one line with the value, the rule and the remedy.
        SystemExit: only for `--help`.
    """
    words = [_with_dashes(word) for word in (sys.argv[1:] if argv is None else argv)]
    parser, known = _parser()
    _check_flags(words, known)
    given = vars(parser.parse_args(words))
    if given.get("strategy"):
        _overlay(given, read_strategy_settings(given["strategy"]), given["strategy"])
    return build_config(given)


def build_config(given: Mapping[str, Any]) -> Config:
    """Build every section from the values given, by field; the rest keep their defaults.

    Raises:
        ConfigError: if a required value is missing, or a value is wrong.
    """
    declared = list(flags())
    missing = [flag(each.name) for each in declared if each.default is MISSING and each.name not in given]
    if missing:
        raise ConfigError(f"{', '.join(missing)} must be given: add {'it' if len(missing) == 1 else 'them'}")
    sections = {
        section: section_class(
            **{each.name: given[each.name] for each in declared if each.section == section and each.name in given}
        )
        for section, section_class in get_type_hints(Config).items()
    }
    return Config(**sections)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are ours."""

    def error(self, message: str) -> NoReturn:
        # argparse writes `argument --lr/--other: what is wrong`; the first spelling is enough.
        text = re.sub(r"^argument (--[\w-]+)(/--[\w-]+)*: ", r"\1 ", message)
        text = text.replace("unrecognized arguments:", "no flag takes the value")
        remedies = {"expected": "give it one", "no flag": "drop it", "ignored": "drop the value"}
        remedy = next((remedy for clue, remedy in remedies.items() if clue in text), "")
        raise ConfigError(f"{text}: {remedy}" if remedy else text)


def _parser() -> tuple[_Parser, list[str]]:
    """Return the parser, and every flag it knows."""
    parser = _Parser(
        prog=PROGRAM,
        usage=f"deepspeed {PROGRAM} --num-layers N ... [flags]",
        description="Pretrain a GPT with data, pipeline and token-slice parallelism on DeepSpeed.",
        epilog="Flags may also be spelled with underscores. docs/arguments.md has the same list.",
        argument_default=argparse.SUPPRESS,  # What is not given stays absent, so a strategy can fill it in.
        allow_abbrev=False,
    )
    known = ["--help"]
    groups = {
        section: parser.add_argument_group(_title(section_class))
        for section, section_class in get_type_hints(Config).items()
    }
    for each in flags():
        for spellings, settings in _spellings(each):
            groups[each.section].add_argument(*spellings, dest=each.name, **settings)
            known += spellings
    return parser, known


def _spellings(each: Flag) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Yield the flag, then the shorthands and translations that set the same field."""
    own = flag(each.name)
    text = each.help + (f" ({_labelled_default(each)})" if each.default_text else "")
    settings: dict[str, Any] = {"help": text.replace("%", "%%")}
    if each.kind is bool:
        settings["action"] = "store_true"
    else:
        settings |= {"type": _converter(each.kind), "metavar": each.metavar}
    if each.repeated:
        settings |= {"nargs": "+", "action": _StoreTuple}
    yield [own, *each.option.aliases], settings
    for spelling, value in each.option.shorthands.items():
        yield [spelling], {"action": "store_const", "const": value, "help": f"The same as {own} {value}."}
    for spelling, words in each.option.translations.items():
        means = ", ".join(f"{word} is {value or 'the default'}" for word, value in words.items())
        yield (
            [spelling],
            {
                "type": _translator(words),
                "metavar": "{" + ",".join(words) + "}",
                "help": f"The same as {own}: {means}.",
            },
        )


class _StoreTuple(argparse.Action):
    """Keep several values as a tuple, which a frozen section can hold."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, tuple(values))


def _converter(kind: type[Any]) -> Callable[[str], Any]:
    wanted = {int: "a whole number", float: "a number"}

    def convert(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text} is not {wanted[kind]}: give one") from None

    return convert


def _translator(words: Mapping[str, str | None]) -> Callable[[str], str | None]:
    def translate(text: str) -> str | None:
        if text not in words:
            raise argparse.ArgumentTypeError(f"{text} is not known: choose {' or '.join(words)}")
        return words[text]

    return translate


def _check_flags(words: Sequence[str], known: Sequence[str]) -> None:
    """Refuse a flag that is not ours, with the reason if it is one of Megatron's, else with the nearest of ours."""
    for word in words:
        name = word.split("=", 1)[0]
        if not name.startswith("--") or name in known:
            continue
        if name in REFUSED_FLAGS:
            raise ConfigError(f"{name}: {REFUSED_FLAGS[name]}")
        nearest = get_close_matches(name, known, n=1)
        remedy = f"did you mean {nearest[0]}?" if nearest else "see --help"
        raise ConfigError(f"{name} is not a flag: {remedy}")


def _overlay(given: dict[str, Any], strategy: Mapping[str, Any], path: str) -> None:
    """Add what a strategy file sets to what flags set; one must not contradict the other."""
    for name, value in strategy.items():
        explicit = given.setdefault(name, value)
        if _comparable(explicit) != _comparable(value):
            raise ConfigError(
                f"{flag(name)} {explicit} contradicts --strategy {path}, where it is "
                f"{'left to the default' if value is None else value}: drop the flag, or change the file"
            )


def _comparable(value: object) -> object:
    return value.replace(" ", "") if isinstance(value, str) else value


def _with_dashes(word: str) -> str:
    """Spell a flag with dashes: launchers pass `--local_rank=0`."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _value_type(hint: Any) -> tuple[type[Any], bool]:
    """Return the type of one value of a field, and whether the field holds several."""
    if isinstance(hint, type):
        return hint, False
    first = get_args(hint)[0]
    if isinstance(first, type):
        return first, get_origin(hint) is tuple
    # A Literal, or the Literal of `Literal | None`.
    return (type(first), False) if not get_args(first) else _value_type(first)


def _title(section_class: type[Any]) -> str:
    """First line of a section's docstring, without its full stop."""
    return (section_class.__doc__ or "").strip().splitlines()[0].rstrip(".")


def _labelled_default(each: Flag) -> str:
    return each.default_text if each.default is MISSING else f"default: {each.default_text}"


def markdown() -> str:
    """Return the text of `docs/arguments.md`."""
    lines = [
        "# Flags",
        "",
        "Generated by `python -m megatron_terapipe.arguments`; edit the docstrings in `megatron_terapipe/config/`.",
        "Flags may also be spelled with underscores.",
    ]
    section = ""
    for each in flags():
        if each.section != section:
            section = each.section
            title = _title(get_type_hints(Config)[section])
            lines += ["", f"## {title}", "", "| flag | default | meaning |", "|---|---|---|"]
        for spellings, settings in _spellings(each):
            shown = ", ".join(f"`{spelling}`" for spelling in spellings)
            metavar = settings.get("metavar", "")
            own = spellings[0] == flag(each.name)
            text = (each.help if own else settings["help"]).replace("|", "\\|")
            lines.append(
                f"| {shown}{f' `{metavar}`' if metavar else ''} | {each.default_text if own else ''} | {text} |"
            )
    lines += ["", "## Refused", "", "Flags of other trainers that end the run with one line.", ""]
    lines += ["| flag | why, and what to do |", "|---|---|"]
    lines += [f"| `{name}` | {line} |" for name, line in sorted(REFUSED_FLAGS.items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
