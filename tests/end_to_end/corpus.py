"""A small corpus, preprocessed as a user does it."""

import json
import random
import subprocess
import sys
from pathlib import Path

from tests.end_to_end.launching import environment

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
    command = [sys.executable, "-m", "megatron_terapipe.data.preprocess", "--tokenizer-type", "byte", "--append-eod"]
    command += ["--input", str(folder / "corpus.jsonl"), "--output-prefix", str(folder / "corpus")]
    subprocess.run(command, check=True, env=environment())
    return folder / "corpus_text_document"
