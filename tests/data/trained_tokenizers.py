"""Small tokenizers of Hugging Face and SentencePiece, trained on a few lines for the tests."""

import io
from pathlib import Path

import pytest
import tokenizers

TEXTS = [
    "Hello world, hello pipelines",
    "low lower lowest",
    "the cat sat on the mat",
    "caf\u00e9 12345 \u4f60\u597d",
] * 20


def train_hugging_face(folder: Path, eod: str = "<|endoftext|>") -> Path:
    """Write a byte-level `tokenizer.json` with truncation and tokens around each text."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[eod, "<|begin|>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"<|begin|> $A {eod}", special_tokens=[(eod, 0), ("<|begin|>", 1)]
    )
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    file = folder / "tokenizer.json"
    tokenizer.save(str(file))
    return file


def train_sentence_piece(folder: Path, **settings: object) -> Path:
    """Write a model with byte fallback, as Llama's."""
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_writer=model,
        **{
            "model_type": "bpe",
            "vocab_size": 330,
            "byte_fallback": True,
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            "minloglevel": 2,
            **settings,
        },
    )
    file = folder / "tokenizer.model"
    file.write_bytes(model.getvalue())
    return file
