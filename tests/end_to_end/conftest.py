"""Data and one training run that many tests look at."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.end_to_end.corpus import write_corpus
from tests.end_to_end.launching import DEEPSPEED, Launch, flags, launch


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a small corpus, as the preprocess command writes it."""
    return write_corpus(tmp_path_factory.mktemp("data"))


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
