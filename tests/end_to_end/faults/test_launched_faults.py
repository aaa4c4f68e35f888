"""DeepSpeed's launcher and a rank that fails."""

import os
import re
from pathlib import Path

import pytest

from tests.end_to_end.launching import (
    DEEPSPEED,
    NO_EVALUATION,
    WITHOUT_ZERO,
    Launch,
    environment,
    error_lines,
    flags,
    read_metrics,
)

pytestmark = pytest.mark.skipif(not DEEPSPEED.exists(), reason=f"{DEEPSPEED} is not there")


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


def test_an_error_of_one_rank_ends_all_ranks(data: Path, tmp_path: Path) -> None:
    """Rank 1 fails while rank 0 waits for its gradients: it prints its error, and its code is that of the launch.

    Otherwise rank 0 would wait for `--distributed-timeout-minutes`, longer than this test.
    """
    (tmp_path / "sitecustomize.py").write_text(FAILING_RANK)  # python runs it at its start
    paths = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    outputs = ["--save", "save", "--metrics-file", "metrics.jsonl", "--report", "r.html"]
    run = Launch(tmp_path, flags(data, *outputs, *NO_EVALUATION, *WITHOUT_ZERO), PYTHONPATH=paths)
    assert run.wait() == 2, run.output()
    assert error_lines(run.output()) == ["error: the text of iteration 3 is gone: bring it back"]
    assert not run.survivors()
    assert len(read_metrics(tmp_path / "metrics.jsonl")[0]) == 2
    # The cause follows the lost connection of rank 0.
    assert re.search(r"rank 1 \(host \S+, process \d+\) ended", (tmp_path / "r.html").read_text())
    # On a busy host rank 0 may write its traceback there before the launcher ends it.
    assert not list((tmp_path / "save").glob("global_step*"))
