"""The section of the data: prefixes with weights, shares for training, validation and test, and the tokenizer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from deepspeed_ext.plan.text_files import read_text
from megatron_terapipe.config.options import check, flag, option, resolve
from megatron_terapipe.config.parsing import read_json
from megatron_terapipe.errors import ConfigError

WeightedPrefixes = tuple[tuple[float | None, str], ...]
"""Prefixes of preprocessed data, each with its weight; all weights None where none is given."""

Part = Literal["train", "valid", "test"]
"""Uses of samples."""

PARTS: tuple[Part, ...] = ("train", "valid", "test")

_LONGEST_SHOWN = 400
DEFAULT_SPLIT = "969,30,1"
"""Shares of training, validation and test."""


def read_weighted_prefixes(flag: str, words: tuple[str, ...]) -> WeightedPrefixes:
    """Return each prefix with its weight; all weights None if none is given."""
    if len(words) == 1:  # A prefix may look like a number, as 2024 does.
        return ((None, words[0]),)
    weights = [_weight(word) for word in words]
    if words and not any(weight is not None for weight in weights):
        return tuple((None, prefix) for prefix in words)
    pairs = tuple(zip(weights[::2], words[1::2], strict=False))
    paired = len(words) % 2 == 0 and all(weight is None for weight in weights[1::2])
    if not words or not paired or not all(weight is not None and 0 < weight < 1e30 for weight, _ in pairs):
        text = " ".join(words)
        text = text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
        raise ConfigError(
            f"{flag} {text or '(empty)'} is neither prefixes nor pairs of a positive weight "
            "and a prefix: write it as 0.3 wiki 0.7 books"
        )
    return pairs


def read_split(split: str) -> tuple[float, float, float]:
    """Return the shares of the data for training, validation and test; they sum to 1."""
    # Scripts that collect their flags in arrays pass the quotes on.
    numbers = [_weight(part) for part in split.strip("'\"").split(",")]
    shares = [number for number in numbers if number is not None and 0 <= number < 1e30]
    if len(shares) != len(numbers) or len(shares) > 3 or not shares[0] > 0:
        raise ConfigError(f"--split {split} is not three shares, the first above 0: write it as 969,30,1")
    total = sum(shares)
    train, valid, test, *_ = (share / total for share in (*shares, 0.0, 0.0))
    return train, valid, test


def read_data_arguments_by_part(path: str) -> dict[Part, tuple[str, ...] | None]:
    """Return the words of the JSON file of `--per-split-data-args-path` by part; None for no words."""
    described = f"--per-split-data-args-path {path}"
    document = read_json(path, "--per-split-data-args-path")
    if not isinstance(document, Mapping) or not document.get("train") or document.keys() - set(PARTS):
        raise ConfigError(
            f"{described} is not an object with the keys train, valid and test: write it as "
            '{"train": "0.3 wiki 0.7 books", "valid": "news", "test": null}'
        )
    return {part: _words_of_part(document.get(part), f"{described}: {part}") for part in PARTS}


def _words_of_part(value: object, described: str) -> tuple[str, ...] | None:
    """Return words that are written as one string or as a list of words and weights; None if there are none."""
    if value is None or isinstance(value, str):
        return tuple((value or "").split()) or None
    if isinstance(value, list) and all(isinstance(word, str | int | float) for word in value):
        return tuple(map(str, value)) or None
    raise ConfigError(f"{described} is neither a string nor a list of prefixes and weights: write it as one of them")


def _weight(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


TOKENIZER_FILES: Mapping[str, tuple[str, ...]] = {
    "byte": (),
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "HuggingFaceTokenizer": ("tokenizer_model",),
    "SentencePieceTokenizer": ("tokenizer_model",),
    "TikTokenizer": ("tokenizer_model",),
    "NullTokenizer": (),
}
"""The files that each tokenizer needs, as fields of `DataConfig`; it takes no other."""

TIKTOKEN_PATTERNS = ("v1", "v2")
"""Names of the patterns by which TikTokenizer splits a text into words."""

TIKTOKEN_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
"""Special tokens that every TikTokenizer has; the last ends a document."""

TOKENIZER_SPELLINGS: Mapping[str, str] = {
    "HFTokenizer": "HuggingFaceTokenizer",
    "SPMTokenizer": "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer": "SentencePieceTokenizer",
    "Llama2Tokenizer": "SentencePieceTokenizer",
}
"""Names that Megatron and NeoX give them."""


TOKENIZER_LIBRARIES: Mapping[str, str | None] = {
    "sentencepiece": "SentencePieceTokenizer",
    "huggingface": "HuggingFaceTokenizer",
    "tiktoken": "TikTokenizer",
}
"""Names that Megatron gives the packages that they are made with."""


_NUMBERS = {1: "a file", 2: "two files"}


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Data."""

    data_path: tuple[str, ...] | None = option(None, metavar="PATH")
    """Prefixes of preprocessed data, or pairs of a weight and a prefix: 0.3 wiki 0.7 books. Without weights, data is
    drawn in proportion to its size. Give this flag, `--train-data-path` or `--mock-data`."""

    mock_data: bool = False
    """Train on random tokens instead of data, to measure speed or to test a setup. The model learns only how often each
    token occurs."""

    split: str | None = option(derived="969,30,1 with --data-path", metavar="A,B,C")
    """Shares of the data for training, validation and test. With no share for validation there is no evaluation."""

    train_data_path: tuple[str, ...] | None = option(None, metavar="PATH")
    """Data for training only, written as for `--data-path`. It replaces `--data-path` and `--split`."""

    valid_data_path: tuple[str, ...] | None = option(None, metavar="PATH")
    """Data for validation, with `--train-data-path`. Default: none, and no evaluation."""

    test_data_path: tuple[str, ...] | None = option(None, metavar="PATH")
    """Data for testing, with `--train-data-path`."""

    data_args_path: str | None = option(None, metavar="FILE")
    """File of the words of `--data-path`, for blends of many prefixes, with spaces or new lines between them."""

    per_split_data_args_path: str | None = option(None, metavar="FILE")
    """JSON file of the words of `--train-data-path` and its two relatives: an object with the keys `train`, `valid` and
    `test`, and a string or a list of words under each."""

    data_cache_path: str | None = option(None, metavar="DIR|none")
    """Directory for the shuffled orders of large epochs, and for the range of the token ids of each large data file.
    The next start reads it, and the ranks of a host share it. Default: `index_cache` in the directory of the first
    data file, if that can be written. With `none` every rank that reads data computes the order in memory."""

    mmap_warmup: bool = False
    """Read the data files once at the start, so that the operating system has them in memory."""

    verify_data: bool = False
    """Read the data files at the start, and compare each with the hash that `preprocess` wrote."""

    train_data_exact_num_epochs: int | None = option(None, least=1, most=10**9)
    """Prepare the training samples of exactly this many epochs. Default: of as many as the run needs."""

    tokenizer_type: str = option(
        derived="GPT2BPETokenizer with --vocab-file and --merge-file, else byte",
        choices=tuple(TOKENIZER_FILES),
        spellings=TOKENIZER_SPELLINGS,
        also={"--tokenizer-library": TOKENIZER_LIBRARIES},
    )
    """Tokenizer that the data was preprocessed with. HFTokenizer is HuggingFaceTokenizer; SPMTokenizer,
    GPTSentencePieceTokenizer and Llama2Tokenizer are SentencePieceTokenizer. NullTokenizer takes texts of token ids
    below `--vocab-size`, of which the highest ends a document."""

    vocab_file: str | None = option(None, metavar="FILE")
    """Vocabulary of the BPE tokenizer (JSON)."""

    merge_file: str | None = option(None, metavar="FILE")
    """Merges of the BPE tokenizer."""

    tokenizer_model: str | None = option(None, metavar="PATH", aliases=("--tokenizer-name-or-path",))
    """File of SentencePieceTokenizer, such as tokenizer.model; of TikTokenizer, its vocabulary (JSON); or of
    HuggingFaceTokenizer: tokenizer.json, or the directory that holds it."""

    tiktoken_pattern: str | None = option(None, choices=TIKTOKEN_PATTERNS)
    """Pattern by which TikTokenizer splits a text into words: Megatron's first or second."""

    tiktoken_num_special_tokens: int = option(1000, least=1, most=10**8)
    """Ids that TikTokenizer reserves for special tokens, before all others."""

    tiktoken_special_tokens: tuple[str, ...] | None = option(None, metavar="TOKEN")
    """Special tokens of TikTokenizer, in the order of their ids; `<unk>`, `<s>` and `</s>` among them. Default: these
    three."""

    reset_position_ids: bool = False
    """Restart positions at each document within a sample."""

    reset_attention_mask: bool = False
    """Let each document within a sample attend only to itself."""

    eod_mask_loss: bool = False
    """Leave the prediction after the end of a document out of the loss: it is the first token of an unrelated
    document."""

    fim_data: bool = option(False, excludes=("mock_data",))
    """Rearrange documents to fill in the middle: beginning, end, middle, or end, beginning, middle."""

    fim_rate: float = option(0.5, least=0, most=1, needs=("fim_data",))
    """Probability that a document within a sample is rearranged."""

    fim_spm_rate: float = option(0.5, least=0, most=1, needs=("fim_data",))
    """Probability that the end of a document that is rearranged comes first."""

    fim_split_sample: str | None = option(None, metavar="TOKEN", needs=("fim_data", "fim_fragment_rate"))
    """Token between fragments of a document, such as files of a repository, which are rearranged one by one."""

    fim_fragment_rate: float | None = option(None, least=0, most=1, needs=("fim_data", "fim_split_sample"))
    """Probability that a fragment is rearranged, in a document that is."""

    fim_no_prefix: str | None = option(None, metavar="TEXT", needs=("fim_data",))
    """Beginning of documents and fragments that are not rearranged."""

    fim_prefix_token: str = option("<fim_prefix>", metavar="TOKEN", needs=("fim_data",))
    """Token before the beginning."""

    fim_middle_token: str = option("<fim_middle>", metavar="TOKEN", needs=("fim_data",))
    """Token before the middle."""

    fim_suffix_token: str = option("<fim_suffix>", metavar="TOKEN", needs=("fim_data",))
    """Token before the end."""

    fim_pad_token: str = option("<fim_pad>", metavar="TOKEN", needs=("fim_data",))
    """Token after a sample that has become shorter."""

    fim_eod_token: str = option("<|endoftext|>", metavar="TOKEN", needs=("fim_data",))
    """Token that ends a document."""

    num_workers: int = option(1, least=0, most=1024)
    """Threads that prepare micro-batches in advance on each rank that reads data. 0 = none; each micro-batch is then
    read when it is needed."""

    def __post_init__(self) -> None:
        resolve(self, "tokenizer_type", "GPT2BPETokenizer" if self.vocab_file or self.merge_file else "byte")
        check(self)
        self._read_files_of_paths()
        self._check_paths()
        self._check_tokenizer()

    def check_source(self) -> None:
        """Check that a flag names data; a program of the user's own may make its data instead."""
        if self.data_path is None and self.train_data_path is None and not self.mock_data:
            raise ConfigError(
                "neither --data-path nor --train-data-path is given: add one, or --mock-data to try a run without"
            )

    @property
    def separates_documents(self) -> bool:
        """Whether the documents within a sample are separated: by their positions, by attention, or by both."""
        return self.reset_position_ids or self.reset_attention_mask

    @property
    def reads_ends(self) -> bool:
        """Whether the ends of documents among the tokens are needed."""
        return self.separates_documents or self.eod_mask_loss

    def weighted_prefixes(self, part: Part = "train") -> WeightedPrefixes:
        """Return each prefix of a part with its weight, all weights None if none is given; empty if it has no data."""
        name = "data_path" if self.data_path is not None else f"{part}_data_path"
        words = getattr(self, name)
        return () if words is None else read_weighted_prefixes(flag(name), words)

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Prefixes of all data files, each once."""
        return tuple(dict.fromkeys(prefix for part in PARTS for _, prefix in self.weighted_prefixes(part)))

    def split_shares(self) -> tuple[float, float, float] | None:
        """Return the shares of the data for training, validation and test, which sum to 1; None if each has its own."""
        return None if self.split is None else read_split(self.split)

    def has(self, part: Part) -> bool:
        """Return whether any data is for a part."""
        shares = self.split_shares()
        return shares[PARTS.index(part)] > 0 if shares else bool(self.weighted_prefixes(part))

    def _read_files_of_paths(self) -> None:
        """Take prefixes from the files that name them; a flag for the same prefixes must agree."""
        named: dict[str, tuple[str, ...] | None] = {}
        if self.data_args_path is not None:
            listed = named["data_path"] = tuple(read_text(self.data_args_path, "--data-args-path").split())
            if not listed:
                raise ConfigError(f"--data-args-path {self.data_args_path} is empty: write prefixes into it")
        if self.per_split_data_args_path is not None:
            by_part = read_data_arguments_by_part(self.per_split_data_args_path)
            named |= {f"{part}_data_path": words for part, words in by_part.items()}
        for name, words in named.items():
            given = getattr(self, name)
            if given is not None and given != words:
                file = "data_args_path" if name == "data_path" else "per_split_data_args_path"
                raise ConfigError(
                    f"{flag(name)} {' '.join(given)} contradicts {flag(file)} {getattr(self, file)}: drop one of them"
                )
            object.__setattr__(self, name, words)

    def _check_paths(self) -> None:
        own = [name for name in ("train_data_path", "valid_data_path", "test_data_path") if getattr(self, name)]
        if self.mock_data and (own or self.data_path is not None):
            named = flag(own[0] if own else "data_path")
            raise ConfigError(f"--mock-data draws tokens at random and {named} names data: drop one of them")
        if own and self.data_path is None and self.train_data_path is None:
            raise ConfigError(f"{flag(own[0])} is given without --train-data-path: add it")
        for name in ("data_path", "split"):
            if own and getattr(self, name) is not None:
                raise ConfigError(
                    f"{flag(name)} divides one body of data and {flag(own[0])} names data of its own: drop one of them"
                )
        if not own:
            resolve(self, "split", DEFAULT_SPLIT)
            self.split_shares()
        for part in PARTS:
            self.weighted_prefixes(part)

    def _check_tokenizer(self) -> None:
        needed = TOKENIZER_FILES[self.tokenizer_type]
        if not all(getattr(self, name) for name in needed):
            raise ConfigError(
                f"--tokenizer-type {self.tokenizer_type} reads {_NUMBERS[len(needed)]}: "
                f"add {' and '.join(map(flag, needed))}"
            )
