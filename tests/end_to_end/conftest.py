"""Data and one training run that many tests look at. Each is made once, by whichever worker comes first."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import warm
from tests.end_to_end.corpus import write_corpus
from tests.end_to_end.hosts.network import Network, missing, network
from tests.end_to_end.launching import PRETRAIN, flags


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that all workers of this session share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if own.name.startswith("popen-") else own


@pytest.fixture(scope="session")
def data(shared: Path) -> Path:
    """Prefix of a small corpus, as the preprocess command writes it."""
    with _by_one(shared / "data") as (folder, first):
        if first:
            write_corpus(folder)
    return folder / "corpus_text_document"


SECRETS = {
    name: f"secret-of-{name.lower()}"
    for name in ("AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "HF_TOKEN", "MLFLOW_TRACKING_PASSWORD")
}
"""Variables of a user's shell that no file and no log of a run may hold."""


@dataclass(frozen=True)
class Trained:
    """A finished run of six iterations on two stages with four token slices."""

    folder: Path

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def output(self) -> str:
        """Output of the run."""
        (log,) = self.folder.glob("log_*.txt")
        return log.read_text()


@pytest.fixture(scope="session")
def trained(data: Path, shared: Path) -> Trained:
    """Run once for all tests; it saves after iterations 3 and 6. A launched run has its losses: `test_resume`."""
    with _by_one(shared / "trained") as (folder, first):
        if first:
            outputs = ["--metrics-file", "metrics.jsonl", "--timeline", "timeline", "--save", "checkpoints"]
            words = flags(data, *outputs, "--report", "report.html", "--save-interval", 3)
            done = warm.run(["deepspeed", "--num_accelerators", "2", str(PRETRAIN), *words], folder, **SECRETS)
            assert done.returncode == 0, done.stdout + done.stderr
            (folder / "log_of_run.txt").write_text(done.stdout + done.stderr)
    return Trained(folder)


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Two hosts of their own for the tests of a file."""
    if reason := missing():
        pytest.skip(reason)
    with network(2, tmp_path_factory.mktemp("hosts")) as made:
        yield made


@contextmanager
def _by_one(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Yield whether this worker fills a folder; the others wait until it is filled.

    Args:
        folder: made if it is missing, and filled again after a worker that failed.
    """
    folder.mkdir(exist_ok=True)
    done = folder / "done"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder, not done.exists()
        done.touch()
