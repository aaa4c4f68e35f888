"""The examples of models of one's own run as their first lines say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_terapipe.search.machine.launcher import free_port

ROOT = Path(__file__).parents[2]
OWN = ROOT / "examples" / "own_model.py"
WITH_STATE = ROOT / "examples" / "own_state_model.py"
HUGGINGFACE = ROOT / "examples" / "huggingface_model.py"


@pytest.mark.parametrize(
    ("example", "line"),
    [
        (OWN, r"^step \d+ loss ([\d.]+)$"),
        (WITH_STATE, r"^step \d+ loss ([\d.]+)$"),
        (HUGGINGFACE, r"^steps: \d+ loss: ([\d.]+)"),
    ],
    ids=["own", "state", "huggingface"],
)
def test_it_trains_under_the_launcher(example: Path, line: str) -> None:
    port = str(free_port())
    launch = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", "2", "--master_port", port]
    done = subprocess.run(
        [*launch, str(example)],
        env=os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall(line, done.stdout, flags=re.MULTILINE)]
    assert len(losses) == 6
    assert losses[0] > 2.0
    assert losses[-1] < losses[0] / 2
