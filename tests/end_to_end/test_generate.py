"""The generate command, as a program of its own, on a checkpoint that training wrote."""

from tests import warm
from tests.end_to_end.conftest import Trained


def test_it_continues_the_prompt(trained: Trained) -> None:
    found = warm.run(
        'terapipe generate --load checkpoints --prompt "the quick" --max-new-tokens 20 --top-k 5', trained.folder
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("the quick")
    new = found.stdout.removeprefix("the quick").removesuffix("\n")
    # After six iterations the letters of the training text are likeliest.
    assert 15 <= len(new) <= 20
    assert sum(letter.islower() or letter == " " for letter in new) > len(new) / 2
