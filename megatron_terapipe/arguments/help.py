"""Help of the flags: `--help` (the most used, one group, or all), and the page `docs/reference/arguments.md`."""

import argparse
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from textwrap import fill
from types import MappingProxyType

from megatron_terapipe.arguments.foreign_flags import foreign_flags
from megatron_terapipe.arguments.parser import (
    ACCEPTED,
    OTHER_DEFAULTS,
    CommandLine,
    Flag,
    add_trainer_flags,
    flags,
    new_parser,
    sections,
    spellings,
    title_of,
)
from megatron_terapipe.config.options import flag
from megatron_terapipe.config.presets import MODEL_PRESETS, Preset
from megatron_terapipe.errors import ConfigError

ALL = "all"
"""Group that has every flag."""

MOST_USED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
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
)
"""Fields whose flags most runs need, by what they are about."""


def groups() -> tuple[str, ...]:
    """Return the names that may follow `--help`: the sections of the configuration, what changes nothing, and all."""
    return (*sections(), ACCEPTED, ALL)


def other_flags(prog: str) -> str:
    """Return the lines of a help text that say how to see the flags that it leaves out; `prog` is what people type."""
    return fill(
        f"These are the flags that most runs need. {prog} --help GROUP shows those of one group, and {prog} --help all "
        f"shows all: GROUP is one of {', '.join(groups())}. docs/reference/arguments.md has the same list.",
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
            raise ConfigError(f"--help {group} names no group of flags: give one of {', '.join(groups())}")
        return group
    return None


def add_flags_of(parser: argparse.ArgumentParser, group: str, *, without: Collection[str] = ()) -> None:
    """Add the flags of a group to a parser that shows them.

    Args:
        group: one of `groups()`, or "" for the flags that most runs need.
    """
    if group:
        add_trainer_flags(parser, CommandLine(), without=without, only=None if group == ALL else group)
        return
    by_name = {each.name: each for each in flags()}
    for title, names in MOST_USED.items():
        shown = parser.add_argument_group(title)
        for name in names:
            _add(shown, by_name[name])


def trainer_help(group: str) -> str:
    """Return the help of `pretrain_gpt.py`: of one of `groups()`, or the short one for ""."""
    parser = new_parser(epilog=None if group else other_flags("pretrain_gpt.py"))
    add_flags_of(parser, group)
    return parser.format_help()


def _add(group: argparse._ArgumentGroup, each: Flag) -> None:
    """Add a flag with the first sentence of its help; of one that lists its values, without what each means."""
    names, settings = next(spellings(each))
    sentence = re.split(r"[.:;](?: |$)" if each.choices else r"\.(?: |$)", each.help, maxsplit=1)[0]
    default = f" (default: {each.default_text})" if each.default_text not in ("", "required") else ""
    settings = {"metavar": settings["metavar"]} if "metavar" in settings else {"action": "store_true"}
    group.add_argument(names[0], help=f"{sentence}{default}".replace("%", "%%"), **settings)


def markdown() -> str:
    """Return the text of `docs/reference/arguments.md`."""
    return "\n".join([*_own(), *_presets(), *_other_defaults(), *_foreign()]) + "\n"


def _own() -> Iterable[str]:
    yield "# Flags"
    yield ""
    yield "Generated by `python -m megatron_terapipe.arguments`; edit the docstrings in `megatron_terapipe/config/`."
    yield "Flags may also be spelled with underscores."
    section = ""
    for each in flags():
        if each.section != section:
            section = each.section
            yield from ["", f"## {title_of(section)}", "", "| flag | default | meaning |", "|---|---|---|"]
        for names, settings in spellings(each):
            shown = ", ".join(f"`{name}`" for name in names)
            metavar = f" `{settings['metavar']}`" if settings.get("metavar") else ""
            own = names[0] == flag(each.name)
            text = each.help if own else settings["help"]
            yield _row(f"{shown}{metavar}", each.default_text if own else "", text)


def _presets() -> Iterable[str]:
    yield from ["", "## Presets", ""]
    yield "What `--model-preset` sets. A flag wins over it. Parameters are counted with the vocabulary padded."
    yield from ["", "| preset | published as | it sets | from |", "|---|---|---|---|"]
    for name, preset in MODEL_PRESETS.items():
        yield _row(f"`{name}`", _billions(preset.published_parameters), f"`{_words(preset)}`", preset.source)


def _other_defaults() -> Iterable[str]:
    yield from ["", "## Defaults that differ", ""]
    yield "Defaults of Megatron-LM and Megatron-DeepSpeed that differ from ours. Where a training is another one by"
    yield "them, and no flag sets them, a line at the start of a run says so."
    yield from ["", "| flag | there | here |", "|---|---|---|"]
    ours = {each.name: each.default for each in flags()}
    for name, (theirs, _) in OTHER_DEFAULTS.items():
        yield _row(f"`{flag(name)}`", theirs, f"{ours[name]:g}")


def _foreign() -> Iterable[str]:
    foreign = foreign_flags()
    yield from ["", "## Accepted", ""]
    yield "Flags of other trainers whose effect is always on. They change nothing."
    yield from ["", "| flag | why |", "|---|---|"]
    for name, each in sorted(foreign.having("accepted").items()):
        values = " `{" + ",".join(each.values) + "}`" if each.values else ""
        rule = f"; needs {flag(each.needs)}" if each.needs else ""
        if each.says is not None:
            rule = f"; an error where {flag(each.says[0])} says otherwise"
        yield _row(f"`{name}`{values}", f"{each.text}{rule}")
    yield from ["", "## Accepted at one value", ""]
    yield "Flags of other trainers that change nothing at one value. All others end the run with one line."
    yield from ["", "| flag | accepted | why no other |", "|---|---|---|"]
    for name, each in sorted(foreign.having("neutral").items()):
        yield _row(f"`{name}`", f"`{each.values[0]}`", each.text)
    yield from ["", "## No effect", ""]
    yield "Flags of other trainers that are taken and have no effect here; one line at the start of a run lists them."
    yield "First those that concern operation only, then those that have no effect without a flag that is refused here."
    yield from ["", "| without | flags |", "|---|---|"]
    idle = foreign.having("idle")
    for owner in dict.fromkeys(each.without for each in idle.values()):
        names = sorted(name for name, each in idle.items() if each.without == owner)
        yield _row(f"`{owner}`" if owner else "", ", ".join(f"`{name}`" for name in names))
    yield from ["", "## Refused", "", "Flags of other trainers that end the run with one line.", ""]
    yield from ["| flag | why, and what to do |", "|---|---|"]
    for name, each in sorted(foreign.having("refused").items()):
        yield _row(f"`{name}`", each.text)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _billions(count: float) -> str:
    return f"{count / 1e9:.4g} B" if count >= 1e9 else f"{count / 1e6:.4g} M"


def _words(preset: Preset) -> str:
    settings = preset.settings
    return " ".join(flag(name) if value is True else f"{flag(name)} {value}" for name, value in settings.items())
