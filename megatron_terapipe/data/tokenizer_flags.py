"""The flags of a tokenizer, for the commands that are not the trainer."""

import argparse
from typing import TYPE_CHECKING

from megatron_terapipe.config.data import TIKTOKEN_PATTERNS, TOKENIZER_FILES, TOKENIZER_SPELLINGS

if TYPE_CHECKING:
    from megatron_terapipe.data.tokenizer import TokenizerSettings


def add_tokenizer_flags(parser: argparse.ArgumentParser, *, default: str | None, explained: str) -> None:
    """Add the flags of a tokenizer to a parser."""
    group = parser.add_argument_group("tokenizer")
    group.add_argument(
        "--tokenizer-type",
        default=default,
        choices=tuple(TOKENIZER_FILES),
        type=lambda name: TOKENIZER_SPELLINGS.get(name, name),
        metavar="NAME",
        help=explained,
    )
    group.add_argument("--vocab-file", metavar="FILE", help="encoder.json or vocab.json of GPT2BPETokenizer")
    group.add_argument("--merge-file", metavar="FILE", help="vocab.bpe or merges.txt of GPT2BPETokenizer")
    group.add_argument(
        "--tokenizer-model",
        metavar="PATH",
        help="tokenizer.json of HuggingFaceTokenizer or its directory; file of SentencePieceTokenizer or TikTokenizer",
    )
    group.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="size of the vocabulary: of NullTokenizer without the id that ends a document; of TikTokenizer",
    )
    group.add_argument("--tiktoken-pattern", choices=TIKTOKEN_PATTERNS, help="pattern of TikTokenizer")
    group.add_argument(
        "--tiktoken-num-special-tokens",
        type=int,
        default=1000,
        metavar="N",
        help="ids that TikTokenizer keeps for special tokens (default: 1000)",
    )
    group.add_argument(
        "--tiktoken-special-tokens",
        nargs="+",
        metavar="TOKEN",
        help="names of the first of them (default: <unk> <s> </s>)",
    )


def tokenizer_settings(options: argparse.Namespace) -> "TokenizerSettings":
    """Return the settings that the flags give."""
    from megatron_terapipe.data.tokenizer import TokenizerSettings

    special = options.tiktoken_special_tokens
    return TokenizerSettings(
        tokenizer_type=options.tokenizer_type,
        vocab_file=options.vocab_file,
        merge_file=options.merge_file,
        tokenizer_model=options.tokenizer_model,
        vocab_size=options.vocab_size,
        tiktoken_pattern=options.tiktoken_pattern,
        tiktoken_num_special_tokens=options.tiktoken_num_special_tokens,
        tiktoken_special_tokens=None if special is None else tuple(special),
    )
