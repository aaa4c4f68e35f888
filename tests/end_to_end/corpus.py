"""A small corpus, preprocessed as a user does it."""

import json
import random
from pathlib import Path

from megatron_terapipe.data.preprocess import main as preprocess

WORDS = "the quick brown fox jumps over a lazy dog and runs away from it into the dark woods".split()


def write_corpus(folder: Path) -> Path:
    """Prefix of a small corpus, as the preprocess command writes it.

    Args:
        folder: where to write it.
    """
    draw = random.Random(0)
    with (folder / "corpus.jsonl").open("w") as corpus:
        for _ in range(200):
            corpus.write(json.dumps({"text": " ".join(draw.choices(WORDS, k=60))}) + "\n")
    words = ["--tokenizer-type", "byte", "--append-eod", "--input", str(folder / "corpus.jsonl")]
    assert preprocess([*words, "--output-prefix", str(folder / "corpus")]) == 0
    return folder / "corpus_text_document"
