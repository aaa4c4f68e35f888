"""Help of the flags: `--help` shows the most used, one group, or all."""

import argparse
import re
from collections.abc import Collection, Mapping, Sequence
from textwrap import fill
from types import MappingProxyType

from megatron_terapipe.arguments.parser import (
    ACCEPTED,
    CommandLine,
    Flag,
    add_trainer_flags,
    flags,
    new_parser,
    sections,
    spellings,
)
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
    """Add a flag with the first sentence of its help; of one that lists its values, without their meanings."""
    names, settings = next(spellings(each))
    sentence = re.split(r"[.:;](?: |$)" if each.choices else r"\.(?: |$)", each.help, maxsplit=1)[0]
    default = f" (default: {each.default_text})" if each.default_text not in ("", "required") else ""
    settings = {"metavar": settings["metavar"]} if "metavar" in settings else {"action": "store_true"}
    group.add_argument(names[0], help=f"{sentence}{default}".replace("%", "%%"), **settings)
