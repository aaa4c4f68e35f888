"""The generate command on a checkpoint that training wrote."""

import subprocess
import sys

from tests.end_to_end.conftest import Trained
from tests.end_to_end.launching import environment, error_lines


def generate(*options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_terapipe.generate", *map(str, options)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)


def test_it_continues_the_prompt(trained: Trained) -> None:
    found = generate("--load", trained.checkpoints, "--prompt", "the quick", "--max-new-tokens", 20, "--top-k", 5)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("the quick")
    new = found.stdout.removeprefix("the quick").removesuffix("\n")
    # What is likeliest after six iterations are the letters of the text it saw.
    assert 15 <= len(new) <= 20
    assert sum(letter.islower() or letter == " " for letter in new) > len(new) / 2


def test_too_long_a_prompt_is_refused(trained: Trained) -> None:
    found = generate("--load", trained.checkpoints, "--prompt", "a" * 33)
    assert found.returncode == 2
    (line,) = error_lines(found.stderr)
    assert "33 tokens of prompt and 1 new are more than the 32 positions of the model: shorten the prompt" in line
