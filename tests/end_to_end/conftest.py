"""Data and one training run that many tests look at."""

import json
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.end_to_end.launching import DEEPSPEED, Launch, environment, flags, launch

WORDS = "the quick brown fox jumps over a lazy dog and runs away from it into the dark woods".split()


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a small corpus, as the preprocess command writes it."""
    folder = tmp_path_factory.mktemp("data")
    draw = random.Random(0)
    with (folder / "corpus.jsonl").open("w") as corpus:
        for _ in range(200):
            corpus.write(json.dumps({"text": " ".join(draw.choices(WORDS, k=60))}) + "\n")
    command = [sys.executable, "-m", "megatron_terapipe.data.preprocess", "--tokenizer-type", "byte", "--append-eod"]
    command += ["--input", str(folder / "corpus.jsonl"), "--output-prefix", str(folder / "corpus")]
    subprocess.run(command, check=True, env=environment())
    return folder / "corpus_text_document"


@dataclass(frozen=True)
class Trained:
    """A finished run of six iterations on two stages with four token slices."""

    folder: Path
    launch: Launch

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"


@pytest.fixture(scope="session")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Launched once for all tests; it saves after iterations 3 and 6."""
    if not DEEPSPEED.exists():
        pytest.skip(f"{DEEPSPEED} is not there")
    folder = tmp_path_factory.mktemp("trained")
    outputs = ["--metrics-file", "metrics.jsonl", "--timeline", "timeline", "--save", "checkpoints"]
    return Trained(folder, launch(folder, flags(data, *outputs, "--save-interval", 3)))
