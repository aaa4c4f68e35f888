"""Settings of a tokenizer, and their flags for other commands than the trainer. Imports no package of tokenizers."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

from deepspeed_ext.plan.text_files import field_texts
from megatron_terapipe.config.data import TIKTOKEN_PATTERNS, TOKENIZER_FILES, TOKENIZER_SPELLINGS, DataConfig
from megatron_terapipe.config.options import flag, option, option_of


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerSettings:
    """Type, files and sizes of a tokenizer, as a checkpoint stores them."""

    tokenizer_type: str = option("byte", choices=tuple(TOKENIZER_FILES), metavar="NAME")
    """Type of the tokenizer."""
    vocab_file: str | None = option(None, metavar="FILE")
    """Vocabulary of GPT2BPETokenizer: encoder.json or vocab.json."""
    merge_file: str | None = option(None, metavar="FILE")
    """Merge rules of GPT2BPETokenizer: vocab.bpe or merges.txt."""
    tokenizer_model: str | None = option(None, metavar="PATH")
    """Tokenizer.json of HuggingFaceTokenizer or its directory; file of SentencePieceTokenizer or TikTokenizer."""
    vocab_size: int | None = option(None, metavar="N")
    """Number of ids, of NullTokenizer without the one that ends a document, and of TikTokenizer; None otherwise."""
    tiktoken_pattern: str | None = option(None, choices=TIKTOKEN_PATTERNS)
    """Pattern of TikTokenizer."""
    tiktoken_num_special_tokens: int = option(1000, metavar="N")
    """Ids that TikTokenizer reserves for special tokens (default: 1000)."""
    tiktoken_special_tokens: Sequence[str] | None = option(None, metavar="TOKEN")
    """Names of the first of them (default: <unk> <s> </s>)."""

    @classmethod
    def of(cls, data: DataConfig, vocab_size: int | None = None) -> Self:
        """Return the settings of a run."""
        shared = (each.name for each in fields(cls) if each.name != "vocab_size")
        size = ids_of_text(data.tokenizer_type, vocab_size)
        return cls(**{name: getattr(data, name) for name in shared}, vocab_size=size)

    @classmethod
    def of_flags(cls, options: argparse.Namespace) -> Self:
        """Return the settings that the flags of `add_tokenizer_flags` give."""
        given = {each.name: getattr(options, each.name) for each in fields(cls)}
        given["vocab_size"] = ids_of_text(options.tokenizer_type, options.vocab_size)
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


def ids_of_text(tokenizer_type: str, vocab_size: int | None) -> int | None:
    """Return the size of the tokenizer by `--vocab-size`, whose highest id ends a document of NullTokenizer."""
    if tokenizer_type == "NullTokenizer" and vocab_size is not None:
        return vocab_size - 1
    return vocab_size if tokenizer_type == "TikTokenizer" else None


def add_tokenizer_flags(parser: argparse.ArgumentParser, *, default: str | None, explained: str) -> None:
    """Add a flag for each field of `TokenizerSettings`."""
    group = parser.add_argument_group("tokenizer")
    texts = field_texts(TokenizerSettings)
    for field in fields(TokenizerSettings):
        name, details = field.name, option_of(field)
        is_type = name == "tokenizer_type"
        group.add_argument(
            flag(name),
            default=default if is_type else field.default,
            type=int if details.metavar == "N" else lambda word: TOKENIZER_SPELLINGS.get(word, word),
            nargs="+" if name == "tiktoken_special_tokens" else None,
            choices=details.choices or None,
            metavar=details.metavar or None,
            help=explained if is_type else texts[name][0].lower() + texts[name][1:].rstrip("."),
        )
