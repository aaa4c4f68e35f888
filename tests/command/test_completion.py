"""`terapipe completion`: scripts of shells, and their completions."""

import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from megatron_terapipe.arguments.foreign_flags import foreign_flags
from megatron_terapipe.command.completion import SHELLS, script
from megatron_terapipe.command.main import COMMANDS, main
from megatron_terapipe.config.presets import MODEL_PRESETS

FLAGS = ("--pipeline-schedule", "--num-token-slices", "--hostfile", "--global-batch-size", "--output-prefix", "--dtype")
"""Flags of several commands."""

# Each line of standard input is the words up to the cursor.
ASK = """
source "$1"
while read -r line; do
    eval "COMP_WORDS=($line)"; COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
    _shtab_terapipe
    echo "${COMPREPLY[*]}"
done
"""

script = cache(script)


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_name_commands_and_flags(shell: str) -> None:
    text = script(shell)
    names = [*COMMANDS, *(part.name for command in COMMANDS.values() for part in command.parts)]
    assert all(name in text for name in (*names, "to-huggingface"))
    assert all(each in text for each in FLAGS)
    # Flags that are taken and do nothing are not offered.
    assert not any(f"{name} " in text for name in foreign_flags().having("idle"))
    if found := shutil.which(shell):
        done = subprocess.run(
            [found, "-n", "/dev/stdin"], input=text, capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")


def test_bash_completes_commands_flags_names_and_files(tmp_path: Path) -> None:
    (tmp_path / "completion.sh").write_text(script("bash"))
    (tmp_path / "mistral.json").touch()
    (tmp_path / "checkpoints").mkdir()
    expected = {
        "terapipe se": {"search"},
        "terapipe search ''": {part.name for part in COMMANDS["search"].parts},
        "terapipe search rank --sche": {"--schedule"},
        "terapipe search rank mist": {"mistral.json", *(name for name in MODEL_PRESETS if name.startswith("mist"))},
        "terapipe search rank x hostfile --device GH": {"GH200-96GB", "GH200-144GB"},
        "terapipe train --pipeline-schedule z": {"zero-bubble"},
        "terapipe train --activation s": {"squared-relu", "swiglu"},
        "terapipe train --launcher ''": {"pdsh", "openmpi", "slurm", "mpich", "impi", "mvapich"},
        "terapipe train --load ''": {"checkpoints"},
        "terapipe convert to-huggingface --dtype ''": {"fp32", "bf16", "fp16"},
        "terapipe completion ''": {*SHELLS},
    }
    lines = "".join(f"{line}\n" for line in expected)
    command = ["bash", "--norc", "-c", ASK, "ask", "completion.sh"]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=True)
    answers = dict(zip(expected, map(shlex.split, done.stdout.splitlines()), strict=True))
    assert {line: {*answer} for line, answer in answers.items()} == expected


def test_a_shell_that_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fisch"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: argument shell: invalid choice: 'fisch'") and line.count("\n") == 1


def test_the_command_prints_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out == script("zsh") + "\n"
