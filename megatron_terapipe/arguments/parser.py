"""The flags of the trainer, derived from the fields of `Config`; the parser of the command line, and its help.

fields of the sections -> flags() -> argparse, with errors of ours -> CommandLine -> notices at the start of the run
"""

import argparse
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from textwrap import fill
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from deepspeed_ext.plan.text_files import field_texts
from megatron_terapipe.arguments.foreign_flags import foreign_flags
from megatron_terapipe.arguments.spellings import ABSENT, Spellings
from megatron_terapipe.config import Config
from megatron_terapipe.config.options import Option, Otherwise, choices_of, flag, one_of, option_of
from megatron_terapipe.errors import ConfigError

METAVARS = {int: "N", float: "X", str: "NAME"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """A flag, as its field describes it."""

    section: str
    """Field of `Config` that holds the section."""

    name: str

    kind: type[Any]
    """Type of one value: int, float, str or bool."""

    repeated: bool

    default: object
    """Default of the field; MISSING if the flag is required."""

    choices: tuple[str | int, ...]
    """Values accepted; empty if any of the type."""

    help: str

    option: Option
    """Other spellings, bounds, and other facts about the field."""

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


@cache
def sections() -> dict[str, type[Any]]:
    """Return the classes of sections whose fields are flags: sections of the configuration, and other spellings."""
    return {**Config.sections(), "spellings": Spellings}


@cache
def flags() -> tuple[Flag, ...]:
    """Yield all flags, section by section."""
    return tuple(_flags())


def default_of(name: str) -> Any:
    """Return the default of a field."""
    return next(each.default for each in flags() if each.name == name)


def _flags() -> Iterator[Flag]:
    for section, section_class in sections().items():
        hints, texts = get_type_hints(section_class), field_texts(section_class)
        choices = choices_of(section_class)  # type: ignore[arg-type]  # a class is hashable
        for declared in fields(section_class):
            kind, repeated = _value_type(hints[declared.name])
            bounds = option_of(declared).bounds
            yield Flag(
                section=section,
                name=declared.name,
                kind=kind,
                repeated=repeated,
                default=declared.default,
                choices=choices[declared.name],
                help=texts[declared.name] + (f" {bounds[0].upper()}{bounds[1:]}." if bounds else ""),
                option=option_of(declared),
            )


def title_of(section: str) -> str:
    """First line of the docstring of a section, without its full stop."""
    section_class = sections()[section]
    return (section_class.__doc__ or "").strip().splitlines()[0].rstrip(".")


def _value_type(hint: Any) -> tuple[type[Any], bool]:
    """Return the type of one value of a field, and whether the field holds several."""
    if isinstance(hint, type):
        return hint, False
    first = get_args(hint)[0]
    if isinstance(first, type):
        return first, get_origin(hint) is tuple
    # A Literal, or the Literal of `Literal | None`.
    return (type(first), False) if not get_args(first) else _value_type(first)


OTHER_DEFAULTS: Mapping[str, tuple[float, Callable[[Config], bool] | None]] = {
    "hidden_dropout": (0.1, lambda config: True),
    "attention_dropout": (0.1, lambda config: True),
    "initial_loss_scale": (2.0**32, lambda config: config.precision.fp16 and config.precision.loss_scale is None),
    "eval_iters": (100, None),
    "log_interval": (100, None),
    "distributed_timeout_minutes": (10.0, None),
    "num_workers": (2, None),
}
"""Defaults of Megatron's that differ from ours, by field; with each whether a training under a configuration is another
one by it, None where it is only reported."""


PROGRAM = "pretrain_gpt.py"

SEE_HELP = "see --help all"

ACCEPTED = "accepted"
"""Group of the flags of other trainers that have no effect here."""

MOST_HINTS = 20
"""Unknown flags for which the nearest flag is searched for, which takes some milliseconds each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandLine:
    """The fields that a command line sets, and by which flag."""

    given: dict[str, Any] = field(default_factory=dict)
    """Value of each field that a flag sets."""

    fallbacks: dict[str, tuple[str, Any]] = field(default_factory=dict)
    """Flag, and its value where no other flag or file sets the field, by field."""

    accepted: list[str] = field(default_factory=list)
    """Flags whose effect is always on."""

    idle: list[str] = field(default_factory=list)

    set_by: dict[str, str] = field(default_factory=dict)
    """Flag that set each field, as it was spelled."""

    has_own_data: bool = False
    """Whether the program makes its data."""

    def set(self, name: str, spelling: str, value: Any) -> None:
        """Set a field. A flag may be repeated, and the last one counts; two flags that disagree are an error."""
        if isinstance(value, Otherwise):
            self.fallbacks[name] = (spelling, value.value)
            return
        earlier = self.set_by.setdefault(name, spelling)
        if earlier != spelling and self.given[name] != value:
            raise ConfigError(f"{spelling} contradicts {earlier}: drop one of them")
        self.given[name] = value

    def take(self, spelling: str, value: Any) -> None:
        """Take a flag of another trainer, which sets no field."""
        found = foreign_flags().flags[spelling]
        for each in value if found.takes == "*" else (value,):
            if found.choices and each not in found.choices:
                raise ConfigError(f"{spelling} {each} is not known: choose {one_of(found.choices)}")
        if found.verdict == "accepted":
            self.accepted.append(spelling)
        elif found.verdict == "idle" and spelling not in self.idle:
            self.idle.append(spelling)


OwnFlags = Callable[[argparse.ArgumentParser], object]
"""Adds the flags of a program of the user's own to a parser."""


def read_command_line(
    argv: Sequence[str], own_flags: OwnFlags | None = None, *, has_own_data: bool = False
) -> CommandLine:
    """Read words; flags that the program adds set the field `own`."""
    parser, line = _parser(), CommandLine(has_own_data=has_own_data)
    known = dict.fromkeys(parser._option_string_actions)
    words = list(argv)
    if own_flags is not None:
        own = _Parser(prog=PROGRAM, add_help=False, allow_abbrev=False)
        own_flags(own)
        both = [name for name in own._option_string_actions if name in known]
        if both:
            raise ConfigError(f"{both[0]} of the program is a flag of the trainer: give it another name")
        known |= dict.fromkeys(own._option_string_actions)
        words = [word if word.partition("=")[0] in own._option_string_actions else _with_dashes(word) for word in words]
        line.given["own"], words = own.parse_known_args(words)
    words = [_with_dashes(word) for word in words]
    _check_flags(words, known)
    return parser.parse_args(words, namespace=line)


@cache
def _parser() -> argparse.ArgumentParser:
    """Return the parser of all flags, which takes longer to make than to use."""
    parser = new_parser()
    add_trainer_flags(parser)
    return parser


def spellings(each: Flag) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Yield the flag, then other flags that set the same field; with each its settings for `argparse`."""
    own = flag(each.name)
    label = "" if each.default is MISSING else "default: "
    text = each.help + (f" ({label}{each.default_text})" if each.default_text else "")
    settings: dict[str, Any] = {"help": text.replace("%", "%%")}
    if each.kind is bool:
        settings |= {"nargs": 0, "const": True}
    else:
        # DeepSpeed quotes a pattern for other hosts if it has a blank: `remote_words` adds one at its end.
        read = partial(_value, str.strip if each.metavar == "PATTERN" else each.kind, each.option.spellings)
        settings |= {"type": _argument(read), "metavar": each.metavar}
    if each.repeated:
        settings["nargs"] = "+"
    yield [own, *each.option.aliases], settings
    for spelling, meaning in each.option.also.items():
        match meaning:
            case str() | int():
                yield [spelling], {"nargs": 0, "const": meaning, "help": f"The same as {own} {meaning}."}
            case Otherwise(value):
                text = f"{own} {value}, unless another flag or file sets it."
                yield [spelling], {"nargs": 0, "const": meaning, "help": text}
            case Mapping():
                text = ", ".join(f"{word} is {value or 'the default'}" for word, value in meaning.items())
                words = "{" + ",".join(meaning) + "}"
                yield (
                    [spelling],
                    {
                        "type": _argument(partial(_meaning, meaning)),
                        "metavar": words,
                        "help": f"The same as {own}: {text}.",
                    },
                )
            case _:
                text = f"The same as {own}, in Megatron's form."
                yield [spelling], {"type": _argument(meaning), "metavar": "VALUE", "help": text}


def _argument(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a reader of a value whose ValueError is the line about it."""

    def convert(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _value(kind: Callable[[str], Any], other_words: Mapping[str, str], text: str) -> Any:
    """Return a value of a type, which may have other words for some values."""
    if not text.strip():
        # A script's variable that is not set: `--save "$DIR"`.
        raise ValueError("is given an empty value: give another, or drop it")
    try:
        return kind(other_words.get(text, text))
    except ValueError:
        raise ValueError(f"{text} is not {'a whole number' if kind is int else 'a number'}: give one") from None


def _meaning(meanings: Mapping[str, str | None], text: str) -> str | None:
    if text not in meanings:
        raise ValueError(f"{text} is not known: choose {' or '.join(meanings)}")
    return meanings[text]


class _Set(argparse.Action):
    """Sets a field of a command line, by the flag as it was spelled."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        # A frozen section can hold a tuple.
        value = self.const if self.nargs == 0 else tuple(values) if self.nargs == "+" else values
        namespace.set(self.dest, option_string, value)


class _Take(argparse.Action):
    """Takes a flag of another trainer."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        namespace.take(option_string, values)


_REMEDIES_FOR_FILES = {
    ".json": "use --deepspeed-config for a configuration of DeepSpeed, --load for a model",
    ".toml": "give its settings as flags",
    ".yaml": "give its settings as flags, or use terapipe neox for a file of GPT-NeoX",
    ".yml": "give its settings as flags, or use terapipe neox for a file of GPT-NeoX",
}
"""Remedies for files of other trainers, given without a flag, by their suffix."""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are ours, and for which -1,0 is a value."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._negative_number_matcher = re.compile(r"-[\d.]")

    def error(self, message: str) -> NoReturn:
        # argparse writes `argument --lr/--other: message`; the first spelling is enough.
        text = re.sub(r"^argument (--[\w-]+)(/--[\w-]+)*: ", r"\1 ", message)
        text = text.replace("unrecognized arguments:", "no flag takes the value")
        remedies = {
            "expected": "give it one",
            "no flag": _REMEDIES_FOR_FILES.get(Path(text).suffix, "drop it"),
            "ignored": "drop the value",
        }
        remedy = next((remedy for clue, remedy in remedies.items() if clue in text), "")
        raise ConfigError(f"{text}: {remedy}" if remedy else text)


def new_parser(epilog: str | None = None, prog: str = PROGRAM) -> argparse.ArgumentParser:
    """Return a parser without flags, whose errors are ours; `epilog` ends its help."""
    return _Parser(
        prog=prog,
        usage=f"deepspeed {prog} --num-layers N ... [flags]",
        description="Pretrain a GPT with data, tensor, pipeline and token-slice parallelism on DeepSpeed.",
        epilog=epilog or "Flags may also be spelled with underscores.",
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_trainer_flags(
    parser: argparse.ArgumentParser, *, without: Collection[str] = (), only: str | None = None
) -> None:
    """Add the flags of the trainer to a parser, whose namespace is a `CommandLine`.

    Args:
        only: section whose flags are added, or `ACCEPTED`; None for all.
    """
    groups = {section: parser.add_argument_group(title_of(section)) for section in sections()}
    for each in flags():
        if each.name in without or only not in (None, each.section):
            continue
        for names, settings in spellings(each):
            groups[each.section].add_argument(*names, action=_Set, dest=each.name, **settings)
    if only not in (None, ACCEPTED):
        return
    group = parser.add_argument_group("Accepted", "Flags of other trainers that have no effect here.")
    for name, foreign in foreign_flags().flags.items():
        if foreign.verdict == "refused":
            continue
        settings = {"help": argparse.SUPPRESS}
        if foreign.takes != 1:
            settings["nargs"] = foreign.takes
        if foreign.verdict == "accepted":
            settings |= {"help": f"{foreign.text.capitalize()}.", "metavar": "{" + ",".join(foreign.choices) + "}"}
        group.add_argument(name, action=_Take, **settings)


def _check_flags(words: Sequence[str], known: Collection[str]) -> None:
    """Refuse the flags that are not ours, all in one line: a script of another trainer often has several."""
    foreign = foreign_flags()
    given = {name for name, values in _flags_with_values(words) if (name, *values) not in ABSENT}
    by_reason: dict[str, list[str]] = {}
    unknown: set[str] = set()
    for name, values in _flags_with_values(words):
        by_value = name in foreign.flags and foreign.flags[name].verdict in ("neutral", "idle")
        if (by_value or name not in known) and (reason := foreign.refusal(name, values, given)) is not None:
            by_reason.setdefault(reason, []).append(" ".join((name, *values)) if by_value else name)
        elif len(values) > 1 and name in foreign.one_value:
            by_reason.setdefault(foreign.one_value[name], []).append(" ".join((name, *values)))
        elif (needed := foreign.needed.get(name)) and not given & set(needed):
            reason = f"Megatron ignores it without {needed[0]}: add {needed[0]}, or drop {name}"
            by_reason.setdefault(reason, []).append(" ".join((name, *values)))
        elif name not in known and name not in unknown:
            unknown.add(name)
            hint = _hint(name, known) if len(unknown) <= MOST_HINTS else SEE_HELP
            by_reason.setdefault(hint, []).append(f"{name} is not a flag")
    if by_reason:
        refused = (f"{', '.join(dict.fromkeys(names))}: {reason}" for reason, names in by_reason.items())
        raise ConfigError("; ".join(refused))


def _flags_with_values(words: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    starts = [number for number, word in enumerate(words) if word.startswith("--")]
    for start, end in pairwise([*starts, len(words)]):
        name, equals, value = words[start].partition("=")
        yield name, (*((value,) if equals else ()), *words[start + 1 : end])


def _hint(name: str, known: Collection[str]) -> str:
    # In torchtitan and NeMo a name has its section before it: --training.steps.
    name = f"--{name.removeprefix('--').rpartition('.')[2]}"
    other_names = foreign_flags().other_names
    if name in other_names:
        return f"did you mean {other_names[name]}?"
    if len(name) > 2 * max(map(len, known)):
        return SEE_HELP
    # Dashes, which every flag begins with, would make all names alike.
    nearest = get_close_matches(name.removeprefix("--"), [each.removeprefix("--") for each in known], n=1, cutoff=0.7)
    return f"did you mean --{nearest[0]}?" if nearest else SEE_HELP


def _with_dashes(word: str) -> str:
    """Spell a flag with dashes: launchers pass `--local_rank=0`."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def notices(line: CommandLine, values: Mapping[str, Any], config: Config) -> Iterator[str]:
    """Yield the lines that rank 0 prints at the start, about a command line and the values of all its sources."""
    owners = {name: foreign_flags().flags[name].without for name in line.idle}
    if operation := [name for name, owner in owners.items() if not owner]:
        yield f"These flags concern operation only and have no effect here: {', '.join(operation)}"
    missing = {name: owner for name, owner in owners.items() if owner and owner not in map(flag, values)}
    if others := [f"{name} ({owner})" for name, owner in missing.items()]:
        yield f"These flags have no effect without another one (in brackets): {', '.join(others)}"
    differing = [
        f"{flag(name)} {default_of(name):g} (there {theirs:.10g})"
        for name, (theirs, trains) in OTHER_DEFAULTS.items()
        if trains is not None and name not in values and trains(config)
    ]
    if config.model.moe_expert_capacity_factor is not None and "--moe-token-drop-policy" not in line.idle:
        differing.append("--moe-token-drop-policy position (there probs)")
    if differing:
        yield (
            f"These defaults differ from Megatron's, and no flag sets them: {', '.join(differing)}; "
            "--defaults megatron sets Megatron's"
        )


ALL = "all"

MOST_USED: Mapping[str, tuple[str, ...]] = {
    "model": (
        *("model_preset", "num_layers", "hidden_size", "num_attention_heads", "seq_length"),
        *("max_position_embeddings", "recompute_granularity"),
    ),
    "data": ("data_path", "mock_data", "tokenizer_type", "tokenizer_model", "split"),
    "pipeline and ranks": (
        *("pipeline_model_parallel_size", "num_token_slices", "token_slices", "pipeline_schedule"),
        *("tensor_model_parallel_size", "sequence_parallel", "ds_sequence_parallel_size", "zero_stage", "strategy"),
    ),
    "batch and learning rate": (
        *("micro_batch_size", "global_batch_size", "train_iters", "lr", "min_lr", "lr_warmup_iters"),
        *("lr_decay_style", "bf16"),
    ),
    "checkpoints and logs": (
        *("save", "save_interval", "load", "finetune", "log_interval", "eval_interval", "metrics_file"),
        *("tensorboard_dir", "wandb_project", "timeline"),
    ),
    "before a run": ("dry_run",),
}
"""Fields of the flags that most runs need, by topic."""


def groups() -> tuple[str, ...]:
    """Return the names that may follow `--help`: the sections of the configuration, accepted flags, and all."""
    return (*sections(), ACCEPTED, ALL)


def other_flags(prog: str) -> str:
    """Return the lines of a help text about the flags that it leaves out; `prog` is the command as users type it."""
    return fill(
        f"These are the flags that most runs need. {prog} --help GROUP shows the flags of one group, and {prog} --help "
        f"all shows all: GROUP is one of {', '.join(groups())}.",
        width=110,
        break_on_hyphens=False,
    )


def asked_for(words: Sequence[str]) -> str | None:
    """Return the group whose help words ask for, "" for the short help; None if they ask for no help."""
    for number, word in enumerate(words):
        name, equals, group = word.partition("=")
        if name == "--help-all":
            return ALL
        if name not in ("-h", "--help"):
            continue
        following = words[number + 1 : number + 2]
        if not equals and following and not following[0].startswith("-"):
            group = following[0]
        if group and group not in groups():
            raise ConfigError(f"--help {group} is not a group of flags: give one of {', '.join(groups())}")
        return group
    return None


def add_flags_of(parser: argparse.ArgumentParser, group: str, *, without: Collection[str] = ()) -> None:
    """Add the flags of a group to a parser that shows them.

    Args:
        group: one of `groups()`, or "" for the flags that most runs need.
    """
    if group:
        add_trainer_flags(parser, without=without, only=None if group == ALL else group)
        return
    by_name = {each.name: each for each in flags()}
    for title, names in MOST_USED.items():
        shown = parser.add_argument_group(title)
        for name in names:
            _add(shown, by_name[name])


def trainer_help(group: str, prog: str = PROGRAM, own_flags: OwnFlags | None = None) -> str:
    """Return the help of a program: of one of `groups()`, or the short one for ""; with the flags that it adds."""
    parser = new_parser(None if group else other_flags(prog), prog)
    if own_flags is not None and group in ("", ALL):
        own_flags(parser)
    add_flags_of(parser, group)
    return parser.format_help()


def _add(group: argparse._ArgumentGroup, each: Flag) -> None:
    """Add a flag with the first sentence of its help; of one that lists its values, without their meanings."""
    names, settings = next(spellings(each))
    sentence = re.split(r"[.:;](?: |$)" if each.choices else r"\.(?: |$)", each.help, maxsplit=1)[0]
    default = f" (default: {each.default_text})" if each.default_text not in ("", "required") else ""
    settings = {"metavar": settings["metavar"]} if "metavar" in settings else {"action": "store_true"}
    group.add_argument(names[0], help=f"{sentence}{default}".replace("%", "%%"), **settings)
