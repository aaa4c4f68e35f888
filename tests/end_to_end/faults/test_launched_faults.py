"""What DeepSpeed's launcher makes of a rank that fails."""

import os
import re
from pathlib import Path

import pytest

from tests.end_to_end.launching import DEEPSPEED, Launch, environment, error_lines, flags, read_metrics

pytestmark = pytest.mark.skipif(not DEEPSPEED.exists(), reason=f"{DEEPSPEED} is not there")


def test_bad_flags_end_the_launch(data: Path, tmp_path: Path) -> None:
    run = Launch(tmp_path, flags(data, "--pipeline-model-parallel-size", 3, "--save", tmp_path / "save"))
    assert run.wait() == 2, run.output()
    assert len(error_lines(run.output())) == 1
    assert "Traceback" not in run.output()
    assert not run.survivors()
    assert not (tmp_path / "save").exists()


FAILING_RANK = """
import os
import re
if os.environ.get("RANK") == "1":
    from megatron_terapipe.errors import DataError
    from megatron_terapipe.training.step import TrainingStep
    train = TrainingStep.run
    def fail(self, progress, batches):
        if progress.iteration == 2:
            raise DataError("the text of iteration 3 is gone: bring it back")
        return train(self, progress, batches)
    TrainingStep.run = fail
"""


def test_an_error_on_one_rank_ends_them_all(data: Path, tmp_path: Path) -> None:
    """Rank 1 fails while rank 0 waits for its gradients: it says so, its code counts, and nobody is left waiting.

    Left alone, rank 0 would wait for `--distributed-timeout-minutes`, longer than this test does.
    """
    (tmp_path / "sitecustomize.py").write_text(FAILING_RANK)  # python runs it at its start
    paths = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    run = Launch(
        tmp_path,
        flags(data, "--save", "save", "--metrics-file", "metrics.jsonl", "--report", "r.html"),
        PYTHONPATH=paths,
    )
    assert run.wait() == 2, run.output()
    assert error_lines(run.output()) == ["error: the text of iteration 3 is gone: bring it back"]
    assert not run.survivors()
    assert len(read_metrics(tmp_path / "metrics.jsonl")[0]) == 2
    # What rank 0 met, a lost connection, gives way to the cause.
    assert re.search(r"rank 1 \(host \S+, process \d+\) ended", (tmp_path / "r.html").read_text())
    # On a busy host rank 0 comes to keep the traceback of its lost connection there, before the launcher ends it.
    assert not list((tmp_path / "save").glob("global_step*"))
