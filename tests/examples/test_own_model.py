"""The examples of models of one's own run as their first lines say."""

import re
from pathlib import Path

import pytest

from tests import warm
from tests.architecture.sources import ROOT


@pytest.mark.parametrize(
    ("example", "line"),
    [
        ("own_model", r"^step \d+ loss ([\d.]+)$"),
        ("own_state_model", r"^step \d+ loss ([\d.]+)$"),
        ("huggingface_model", r"^steps: \d+ loss: ([\d.]+)"),
    ],
)
def test_it_trains_under_a_launcher(example: str, line: str, tmp_path: Path) -> None:
    done = warm.run(f"deepspeed --num_accelerators 2 {ROOT}/examples/{example}.py", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall(line, done.stdout, flags=re.MULTILINE)]
    assert len(losses) == 6
    assert losses[0] > 2.0
    assert losses[-1] < losses[0] / 2
