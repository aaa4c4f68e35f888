"""The generate command, as a program of its own, on a checkpoint that training wrote."""

import subprocess
import sys

from tests.end_to_end.conftest import Trained
from tests.end_to_end.launching import environment


def test_it_continues_the_prompt(trained: Trained) -> None:
    words = ["--load", str(trained.checkpoints), "--prompt", "the quick", "--max-new-tokens", "20", "--top-k", "5"]
    command = [sys.executable, "-m", "megatron_terapipe.generate", *words]
    found = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("the quick")
    new = found.stdout.removeprefix("the quick").removesuffix("\n")
    # After six iterations the letters of the training text are likeliest.
    assert 15 <= len(new) <= 20
    assert sum(letter.islower() or letter == " " for letter in new) > len(new) / 2
