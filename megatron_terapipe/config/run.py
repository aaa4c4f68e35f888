"""The sections around the training itself: data, checkpoints, logging, DeepSpeed's own settings."""

from dataclasses import dataclass
from typing import Literal

from megatron_terapipe.config.options import (
    check_choices,
    check_not_negative,
    check_positive,
    option,
)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Checkpoints.

    Raises:
        ConfigError: if a flag has no effect without another that is not given.
    """

    save: str | None = option(None, metavar="DIR")
    """Directory to save checkpoints in, at the end and every `--save-interval`."""

    load: str | None = option(None, metavar="DIR")
    """Directory to continue from. If it holds no checkpoint, training starts afresh."""

    save_interval: int | None = None
    """Iterations between checkpoints. Left out, only the end is saved."""

    finetune: bool = False
    """Load the weights alone, and start at iteration 0."""

    no_load_optim: bool = False
    """Do not load the state of the optimizer."""

    no_load_rng: bool = False
    """Do not load the state of the random generators."""

    exit_on_missing_checkpoint: bool = False
    """Fail if `--load` holds no checkpoint."""

    def __post_init__(self) -> None:
        """Check the flags that need another."""
        check_positive(self, "save_interval")
        if self.save_interval is not None and self.save is None:
            raise ConfigError(f"--save-interval {self.save_interval} does not say where to save: add --save")
        if self.load is None:
            for name in ("finetune", "exit_on_missing_checkpoint"):
                if getattr(self, name):
                    raise ConfigError(f"--{name.replace('_', '-')} has nothing to load: add --load, or drop it")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggingConfig:
    """Logging and evaluation.

    Raises:
        ConfigError: if a value is out of range.
    """

    log_interval: int = 10
    """Iterations between lines of the log."""

    eval_interval: int = 1000
    """Iterations between evaluations on the validation data."""

    eval_iters: int = 10
    """Global batches of one evaluation. 0 = never evaluate."""

    metrics_file: str | None = option(None, metavar="FILE")
    """File to append one JSON object per iteration and evaluation to."""

    timeline: str | None = option(None, metavar="DIR")
    """Directory to write the timeline of one iteration to, as it was executed. Left out, none is written."""

    timeline_iteration: int = 3
    """Iteration whose timeline is written. The first ones are slower than the rest."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_positive(self, "log_interval", "eval_interval", "timeline_iteration")
        check_not_negative(self, "eval_iters")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepSpeedConfig:
    """DeepSpeed."""

    deepspeed: bool = False
    """Accepted for scripts that pass it. Training always runs on DeepSpeed."""

    deepspeed_config: str | None = option(None, metavar="FILE")
    """JSON file with further DeepSpeed settings. One that contradicts a flag is an error."""
