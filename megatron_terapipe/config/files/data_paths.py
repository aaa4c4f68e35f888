"""Words that name data: prefixes with weights, shares of a body of data, and the files that hold such words."""

from collections.abc import Mapping
from typing import Literal

from deepspeed_ext.plan.text.text_files import read_text
from megatron_terapipe.config.fields.json_files import read_json
from megatron_terapipe.errors import ConfigError

WeightedPrefixes = tuple[tuple[float | None, str], ...]
"""Prefixes of preprocessed data, each with its weight; all weights None where none is given."""

Part = Literal["train", "valid", "test"]
"""Uses of samples."""

PARTS: tuple[Part, ...] = ("train", "valid", "test")

DEFAULT_SPLIT = "969,30,1"
"""Shares of training, validation and test."""


def read_weighted_prefixes(flag: str, words: tuple[str, ...]) -> WeightedPrefixes:
    """Return each prefix with its weight; all weights None if none is given.

    Args:
        flag: where the words were given, for messages.
        words: prefixes, or pairs of a weight and a prefix.

    Raises:
        ConfigError: if there is no prefix, or not all have a positive weight.
    """
    if len(words) == 1:  # A prefix may look like a number, as 2024 does.
        return ((None, words[0]),)
    weights = [_number(word) for word in words]
    if words and not any(weight is not None for weight in weights):
        return tuple((None, prefix) for prefix in words)
    pairs = tuple(zip(weights[::2], words[1::2], strict=False))
    paired = len(words) % 2 == 0 and all(weight is None for weight in weights[1::2])
    if not words or not paired or not all(weight is not None and 0 < weight < 1e30 for weight, _ in pairs):
        raise ConfigError(
            f"{flag} {' '.join(words) or '(nothing)'} is neither prefixes nor pairs of a positive weight "
            "and a prefix: write it as 0.3 wiki 0.7 books"
        )
    return pairs


def read_split(split: str) -> tuple[float, float, float]:
    """Return the shares of the data for training, validation and test; they sum to 1.

    Raises:
        ConfigError: if `split` is not up to three numbers of which the first is positive.
    """
    # Scripts that collect their flags in arrays pass the quotes on.
    numbers = [_number(part) for part in split.strip("'\"").split(",")]
    shares = [number for number in numbers if number is not None and 0 <= number < 1e30]
    if len(shares) != len(numbers) or len(shares) > 3 or not shares[0] > 0:
        raise ConfigError(f"--split {split} is not three shares, the first above 0: write it as 969,30,1")
    total = sum(shares)
    train, valid, test, *_ = (share / total for share in (*shares, 0.0, 0.0))
    return train, valid, test


def read_data_arguments(path: str) -> tuple[str, ...]:
    """Return the words of a file that stands for `--data-path`.

    Raises:
        UserError: if the file cannot be read, or is empty.
    """
    words = tuple(read_text(path, "--data-args-path").split())
    if not words:
        raise ConfigError(f"--data-args-path {path} is empty: write prefixes into it, as after --data-path")
    return words


def read_data_arguments_by_part(path: str) -> dict[Part, tuple[str, ...] | None]:
    """Return the words of a JSON file that stands for `--train-data-path` and its two relatives; None for no words.

    Raises:
        UserError: if the file cannot be read, or is no object of words by part.
    """
    described = f"--per-split-data-args-path {path}"
    document = read_json(path, "--per-split-data-args-path")
    if not isinstance(document, Mapping) or not document.get("train") or document.keys() - set(PARTS):
        raise ConfigError(
            f"{described} is no object with the keys train, valid and test: write it as "
            '{"train": "0.3 wiki 0.7 books", "valid": "news", "test": null}'
        )
    return {part: _words(document.get(part), f"{described}: {part}") for part in PARTS}


def _words(value: object, described: str) -> tuple[str, ...] | None:
    """Return words that are written as one string or as a list of words and weights; None if there are none."""
    if value is None or isinstance(value, str):
        return tuple((value or "").split()) or None
    if isinstance(value, list) and all(isinstance(word, str | int | float) for word in value):
        return tuple(map(str, value)) or None
    raise ConfigError(f"{described} is neither a string nor a list of prefixes and weights: write it as one of them")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
