"""The example of a model of one's own runs as its first line says."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_model.py"


def test_it_trains_under_the_launcher() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", "2", "--master_port", str(port)]
    done = subprocess.run(
        [*launch, str(EXAMPLE)],
        env=os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+ loss ([\d.]+)$", done.stdout, flags=re.MULTILINE)]
    assert len(losses) == 6
    assert losses[0] > 2.0
    assert losses[-1] < losses[0] / 2


def test_it_stays_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 60
