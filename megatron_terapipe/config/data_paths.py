"""Reading of the words of `--data-path` and `--split`."""

from megatron_terapipe.errors import ConfigError

WeightedPrefixes = tuple[tuple[float | None, str], ...]
"""Prefixes of preprocessed data, each with its weight; all weights None where none is given."""


def read_weighted_prefixes(flag: str, words: tuple[str, ...]) -> WeightedPrefixes:
    """Return each prefix with its weight; all weights None if none is given.

    Args:
        flag: flag of the words, for messages.
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
    numbers = [_number(part) for part in split.split(",")]
    shares = [number for number in numbers if number is not None and 0 <= number < 1e30]
    if len(shares) != len(numbers) or len(shares) > 3 or not shares[0] > 0:
        raise ConfigError(f"--split {split} is not three shares, the first above 0: write it as 969,30,1")
    total = sum(shares)
    train, valid, test, *_ = (share / total for share in (*shares, 0.0, 0.0))
    return train, valid, test


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
