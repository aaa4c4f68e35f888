"""Flags that several commands have, and the model, cluster, constraints and strategies that they name."""

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from math import inf, nan
from typing import TYPE_CHECKING

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.terminal import ProgressLine, up_to
from deepspeed_ext.plan.text_files import field_texts, read_text
from megatron_terapipe.config.batch import MOST_SEQUENCES
from megatron_terapipe.config.model import ModelConfig
from megatron_terapipe.config.parsing import parse_json
from megatron_terapipe.devices import EIGHT_BITS
from megatron_terapipe.dimensions import ordered_for
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.price.workload import IMBALANCE
from megatron_terapipe.search.rank.space import MEMORY_HEADROOM
from megatron_terapipe.strategy import DIMENSIONS, Strategy

if TYPE_CHECKING:
    from megatron_terapipe.search.rank.rules import ProgressCallback

CHANGES = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_key_value_heads"),
    *("seq_length", "sliding_window", "vocab_size", "mtp_num_layers"),
)
"""Fields of the model section that flags of the search may change."""

MANY = up_to(1_000_000)
"""Type of a flag that is a number of devices or strategies."""

FROM_FLAGS = "-"  # MODEL where flags give all of it
FlagSet = argparse.ArgumentParser | argparse._ArgumentGroup  # target of flags

TERAPIPE = "terapipe"
TRAINERS = (TERAPIPE, "megatron-lm", "deepspeed", "megatron-core", "fsdp")
"""Names of `machine.trainers.SOFTWARE`, which takes longer to load than a help text may."""

PRECISIONS = ("bf16", "fp16", "fp32")


def add_model_flags(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add MODEL, perhaps one that may be left out, and the flags that change it."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "model",
        metavar="MODEL",
        nargs=None if required else "?",
        help=(
            "JSON or YAML file, or the name of a preset such as gpt3-13b (an unknown name lists them), or a "
            "config.json of Hugging Face or its folder; - takes the model from flags only"
        ),
    )
    meanings = field_texts(ModelConfig)
    for name in CHANGES:
        meaning = meanings[name].partition(". ")[0].rstrip(".")
        group.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=f"{meaning} (default: MODEL's)")
    group.add_argument(
        "--expert-imbalance",
        type=float,
        metavar="FACTOR",
        help=f"tokens of the expert-parallel rank with most, relative to the mean (default: {IMBALANCE})",
    )


def add_question_flags(parser: argparse.ArgumentParser, *, software: bool = False) -> None:
    """Add MODEL, CLUSTER and the flags that change them or name sources of costs; `software`: also the trainer."""
    add_model_flags(parser)
    group = parser.add_argument_group("cluster")
    group.add_argument("cluster", metavar="CLUSTER", help="JSON or YAML file of nodes, or a hostfile with --device")
    group.add_argument(
        "--device", metavar="NAME", help="device or machine of the library that every host of the hostfile has"
    )
    group.add_argument(
        "--devices-at-most",
        type=MANY,
        metavar="N",
        help="use only a part of the cluster: its fastest nodes, whole ones, with N devices together at most",
    )
    group = parser.add_argument_group("costs")
    group.add_argument(
        "--precision",
        choices=(*PRECISIONS, *EIGHT_BITS),
        help=(
            "type of the matrix products (default: bf16; fp16 where a device has no bf16; fp32 on CPUs); fp8 and mxfp8 "
            "as other trainers compute them"
        ),
    )
    group.add_argument("--profile", metavar="FILE", help="times of ops and links, written by `terapipe search measure`")
    calibration = group.add_mutually_exclusive_group()
    calibration.add_argument(
        "--calibrate",
        metavar="FILE",
        help=(
            "trials of this cluster, one JSON object per line (.jsonl); the constants of the cost model are fitted "
            "to them"
        ),
    )
    calibration.add_argument("--calibration", metavar="FILE", help="constants that --save-calibration wrote")
    if software:
        parser.add_argument_group("trainer").add_argument(
            "--software",
            metavar="NAME",
            default=TERAPIPE,
            help=(
                f"trainer to price: {', '.join(TRAINERS)}, or a JSON or YAML file with the differences from one of "
                f"these (default: {TERAPIPE}, this trainer)"
            ),
        )


def add_constraint_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each dimension that is searched."""
    group = parser.add_argument_group(
        "search space", "A dimension without a flag is free. Give one value to fix it, or the values to try: 1,2,4"
    )
    for each, words in ordered_for(DIMENSIONS, "flag_help"):
        group.add_argument(each.flag, metavar=each.metavar, help=words)


def add_progress_flag(parser: FlagSet) -> None:
    """Add the flag that shows progress."""
    parser.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, help="show progress (default: on a terminal)"
    )


def add_headroom_flag(parser: FlagSet) -> None:
    """Add the flag for the memory that the winner leaves free."""
    parser.add_argument(
        "--memory-headroom",
        type=memory_share,
        metavar="SHARE",
        default=MEMORY_HEADROOM,
        help=f"share of each device's memory to keep free, such as 0.1 or 10%% (default: {MEMORY_HEADROOM})",
    )


def add_batch_flag(parser: FlagSet, *, required: bool = True, more: str = "") -> None:
    """Add the flag for the sequences of an optimizer step; `more`: the end of its help."""
    parser.add_argument(
        "--global-batch-size",
        type=up_to(MOST_SEQUENCES),
        required=required,
        metavar="N",
        help=f"sequences of one optimizer step{more}",
    )


def memory_share(text: str) -> float:
    """Return a share of the memory, in [0, 1), from 0.05 or 5%."""
    share = _number(text.strip().removesuffix("%")) / (100 if text.strip().endswith("%") else 1)
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share of the memory from 0 to below 1, such as 0.05 or 5%")
    return share


def above_zero(text: str) -> float:
    """Return a finite number above 0."""
    number = _number(text)
    if not 0 < number < inf:
        raise argparse.ArgumentTypeError(f"{text} is not a finite number above 0")
    return number


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return nan


def whole_numbers(text: str) -> tuple[int, ...]:
    """Return the whole numbers from 1 of a list such as 1,2,4, each once, in rising order."""
    try:
        numbers = {int(word) for word in text.split(",")}
    except ValueError:
        numbers = {0}
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a list of whole numbers from 1, such as 1,2,4")
    return tuple(sorted(numbers))


@contextmanager
def progress_bar(shown: bool | None = None) -> "Iterator[ProgressCallback]":
    """Yield a callback that shows the progress of a search; `shown`: None = if standard error is a terminal."""
    with ProgressLine(shown) as line:
        yield lambda done, total, phase: line.part(phase)((done + 1) / total)


def read_one_strategy(path: str, flag: str) -> Strategy:
    """Read the file of a flag with one strategy; see `read_strategies`."""
    found = read_strategies(path, flag)
    if len(found) > 1:
        raise ConfigError(f"{flag} {path} has {len(found)} strategies: name a file with one of them")
    return found[0]


def read_strategies(path: str, flag: str = "--strategies") -> list[Strategy]:
    """Read a file with a strategy on each line; or one strategy, a list of them, or the answer of a search.

    Empty lines are skipped. The files `strategy.json` and `ranking.json` of `rank` can be read.
    """
    text = read_text(path, flag)
    word, documents = "line", list[object](text.splitlines())
    if text.lstrip()[:1] in ("{", "[") and len(text.strip().splitlines()) > 1:
        # One document over several lines, if it is not one on each.
        with suppress(ConfigError):
            word, whole = "entry", parse_json(text, "the file")
            if isinstance(whole, Mapping) and isinstance(whole.get("entries"), list):
                whole = whole["entries"]
            documents = whole if isinstance(whole, list) else [whole]
    found = []
    for number, document in enumerate(documents, start=1):
        if word == "line" and not str(document).strip():
            continue
        try:
            if word == "line":
                document = parse_json(str(document), "this line")
            if isinstance(document, Mapping) and isinstance(document.get("strategy"), Mapping):
                document = document["strategy"]
            found.append(Strategy.from_json(document))
        except UserError as error:
            raise ConfigError(f"{path} {word} {number}: {error}") from None
    if not found:
        raise ConfigError(f"{flag} {path} holds no strategy: write one JSON object a line")
    return found
