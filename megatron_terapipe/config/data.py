"""The section that says what is read: which data, cut and tokenized how."""

from dataclasses import dataclass
from typing import Literal

from megatron_terapipe.config.options import check_choices, check_not_negative, option
from megatron_terapipe.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Data.

    Raises:
        ConfigError: if a list cannot be read, or a file that the tokenizer needs is not named.
    """

    data_path: tuple[str, ...] = option(metavar="PATH")
    """Prefixes of preprocessed data, or pairs of a weight and a prefix: 0.3 wiki 0.7 books. Without weights, data
    is drawn in proportion to its size."""

    split: str = option("969,30,1", metavar="A,B,C")
    """Shares of the data for training, validation and test. No share for validation means no evaluation."""

    tokenizer_type: Literal["byte", "GPT2BPETokenizer"] = "byte"
    """Tokenizer that the data was preprocessed with."""

    vocab_file: str | None = option(None, metavar="FILE")
    """Vocabulary of the BPE tokenizer (JSON)."""

    merge_file: str | None = option(None, metavar="FILE")
    """Merges of the BPE tokenizer."""

    num_workers: int = 1
    """Threads that prepare micro-batches ahead on each rank that reads data. 0 = none, each is read when needed."""

    def __post_init__(self) -> None:
        """Check the lists and the files."""
        check_choices(self)
        check_not_negative(self, "num_workers")
        self.weighted_prefixes()
        self.split_shares()
        if self.tokenizer_type == "GPT2BPETokenizer" and not (self.vocab_file and self.merge_file):
            raise ConfigError("--tokenizer-type GPT2BPETokenizer reads two files: add --vocab-file and --merge-file")

    def weighted_prefixes(self) -> tuple[tuple[float | None, str], ...]:
        """Return each prefix with its weight; all weights None if none is given.

        Raises:
            ConfigError: if there is no prefix, or not all have a positive weight.
        """
        words = self.data_path
        if len(words) == 1:  # A prefix may look like a number, as 2024 does.
            return ((None, words[0]),)
        weights = [_number(word) for word in words]
        if words and not any(weight is not None for weight in weights):
            return tuple((None, prefix) for prefix in words)
        pairs = tuple(zip(weights[::2], words[1::2], strict=False))
        paired = len(words) % 2 == 0 and all(weight is None for weight in weights[1::2])
        if not words or not paired or not all(w is not None and 0 < w < 1e30 for w, _ in pairs):
            raise ConfigError(
                f"--data-path {' '.join(words) or '(nothing)'} is neither prefixes nor pairs of a positive weight "
                "and a prefix: write it as 0.3 wiki 0.7 books"
            )
        return pairs

    def split_shares(self) -> tuple[float, float, float]:
        """Return the shares of the data for training, validation and test; they sum to 1.

        Raises:
            ConfigError: if `split` is not up to three numbers of which the first is positive.
        """
        numbers = [_number(part) for part in self.split.split(",")]
        shares = [number for number in numbers if number is not None and 0 <= number < 1e30]
        if len(shares) != len(numbers) or len(shares) > 3 or not shares[0] > 0:
            raise ConfigError(f"--split {self.split} is not three shares, the first above 0: write it as 969,30,1")
        total = sum(shares)
        train, valid, test, *_ = (share / total for share in (*shares, 0.0, 0.0))
        return train, valid, test


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
