"""Settings of a tokenizer, and their flags for other commands than the trainer. Imports no package of tokenizers."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

from deepspeed_ext.plan.text_files import field_texts
from megatron_terapipe.config.data import TOKENIZER_SPELLINGS, DataConfig
from megatron_terapipe.config.options import Option, flag, option_of


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerSettings:
    """Type, files and sizes of a tokenizer, as a checkpoint stores them: fields of `DataConfig`, and a size."""

    tokenizer_type: str = "byte"
    vocab_file: str | None = None
    merge_file: str | None = None
    tokenizer_model: str | None = None
    vocab_size: int | None = None
    """Number of ids, of NullTokenizer without the one that ends a document, and of TikTokenizer; None otherwise."""
    tiktoken_pattern: str | None = None
    tiktoken_num_special_tokens: int = 1000
    tiktoken_special_tokens: Sequence[str] | None = None

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
    texts = field_texts(DataConfig) | {"vocab_size": "Number of ids of NullTokenizer and of TikTokenizer."}
    options = {each.name: option_of(each) for each in fields(DataConfig)}
    for field in fields(TokenizerSettings):
        name, details = field.name, options.get(field.name, Option())
        is_type, is_number = name == "tokenizer_type", field.type in (int, int | None)
        text = texts[name][0].lower() + texts[name][1:].rstrip(".")
        group.add_argument(
            flag(name),
            default=default if is_type else field.default,
            type=int if is_number else lambda word: TOKENIZER_SPELLINGS.get(word, word),
            nargs="+" if name == "tiktoken_special_tokens" else None,
            choices=details.choices or None,
            metavar="NAME" if is_type else "N" if is_number else details.metavar or None,
            help=explained if is_type else f"{text} (default: {field.default})" if field.default else text,
        )
