"""The tokenizers: their names, also those of other trainers, and the files that each reads."""

from collections.abc import Mapping
from types import MappingProxyType

TOKENIZER_FILES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "byte": (),
        "GPT2BPETokenizer": ("vocab_file", "merge_file"),
        "HuggingFaceTokenizer": ("tokenizer_model",),
        "SentencePieceTokenizer": ("tokenizer_model",),
    }
)
"""The fields of `DataConfig` that each tokenizer needs; it takes no other."""

TOKENIZER_SPELLINGS: Mapping[str, str] = MappingProxyType(
    {
        "HFTokenizer": "HuggingFaceTokenizer",
        "SPMTokenizer": "SentencePieceTokenizer",
        "GPTSentencePieceTokenizer": "SentencePieceTokenizer",
        "Llama2Tokenizer": "SentencePieceTokenizer",
    }
)
"""What Megatron and NeoX call them."""
