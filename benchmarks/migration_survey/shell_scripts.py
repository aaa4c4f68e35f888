"""Commands that shell scripts of other projects would run.

A script composes its command from variables, arrays, conditions and templates of files, which only a shell expands. So
bash runs it, in a copy of the checkout that holds its small text files, and with a PATH of its own: launchers write
down their words, a few programs that read text are real, and every other program does nothing.
"""

import os
import re
import shlex
import shutil
import stat
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.migration_survey.attempts import Attempt

REAL = "cat sed awk grep egrep cut tr head tail wc date basename dirname expr seq sort uniq paste tac bash sh env tee"
"""Programs that are real: they read text and write text."""

LAUNCHERS = "deepspeed torchrun python python3 srun mpirun mpiexec accelerate aprun jsrun uv"
"""Programs that write down their words."""

KEPT = ("*.sh", "*.json", "*.yaml", "*.yml", "*.txt", "*.cfg", "hostfile", "pretrain_gpt.py")
"""Files of a checkout that scripts read."""

TO_A_LOG = re.compile(r"""(2>&1[ \t]*)?(&>>?|(?<![&<\d])>>?)[ \t]*["']?[^\s"'|;&<>]*(log|LOG)[^\s"'|;&<>]*["']?""")
"""Redirection of the output of a command to a log. Its directory is not here, and then the command would not be run."""

PROGRAM = "pretrain_gpt.py"
GPUS = 8
SECONDS = 60
"""Time after which a script is given up."""


def attempts_of_scripts(origin: str, checkout: Path, folders: Sequence[str], copy: Path) -> Iterator[Attempt]:
    """Yield an attempt for each command that pretrains a GPT.

    Args:
        copy: an empty folder for the copy of the checkout.
    """
    programs = copy / "programs"
    _make_programs(programs)
    tree = copy / "checkout"
    _copy_texts(checkout, tree)
    for script in sorted(script for folder in folders for script in (tree / folder).rglob("*.sh")):
        commands = _commands(script, tree, programs)
        for number, (words, directory) in enumerate(commands, start=1):
            name = f"{script.relative_to(tree)}{f' #{number}' if len(commands) > 1 else ''}"
            yield Attempt(origin=origin, name=name, words=words, directory=directory)


def _commands(script: Path, tree: Path, programs: Path) -> list[tuple[tuple[str, ...], Path]]:
    """Return the words of each command, and where it ran: in the folder of the script, or in that of the checkout.

    Scripts assume one or the other; it is where the file that `--deepspeed_config` names has been written.
    """
    found: list[tuple[tuple[str, ...], Path]] = []
    for directory in (script.parent, tree):
        commands = [(words, directory) for words in _run(script, directory, programs)]
        if commands and all((directory / name).is_file() for words, _ in commands for name in _deepspeed_files(words)):
            return commands
        found = found or commands
    return found


def _deepspeed_files(words: Sequence[str]) -> Iterator[str]:
    for word, following in zip(words, [*words[1:], ""], strict=True):
        flag, equals, value = word.replace("_", "-").partition("=")
        if flag == "--deepspeed-config":
            yield word.partition("=")[2] if equals and value else following


def _run(script: Path, directory: Path, programs: Path) -> list[tuple[str, ...]]:
    """Run a script, and return the words that follow the program in each command that it would start."""
    record = programs.parent / "record"
    record.unlink(missing_ok=True)
    # Newer scripts keep in variables what their arguments say of data and checkpoints; others pass arguments on.
    text = script.read_text(encoding="utf-8", errors="replace")
    told = re.search(r"^\s*(export\s+)?\w+=[\"']?\$\{?1\b", text, re.MULTILINE) and "$#" not in text
    arguments = [f"argument{number}" for number in range(1, 7)] if told else []
    environment = {
        "PATH": str(programs),
        "BASH_ENV": str(programs / "environment"),
        "HOME": str(directory),
        "HOSTNAME": "worker-0",
        "RECORD": str(record),
    }
    try:
        subprocess.run(
            [str(programs / "bash"), str(script), *arguments],
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return []
    if not record.exists():
        return []
    commands = (line.split("\0")[:-1] for line in record.read_text(encoding="utf-8").split("\1\n"))
    return list(dict.fromkeys(words for command in commands if (words := _after_program(command))))


def _after_program(command: Sequence[str]) -> tuple[str, ...]:
    """Return the words after the program; a launcher may have been given its command as one word."""
    for number, word in enumerate(command):
        if word.endswith(PROGRAM):
            return tuple(command[number + 1 :])
        if PROGRAM in word:
            return _after_program(shlex.split(word))
    return ()


def _copy_texts(checkout: Path, tree: Path) -> None:
    """Copy the folders of a checkout, and the small files that scripts read, but no links: they may lead out of it."""
    for folder, names, files in os.walk(checkout):
        names[:] = [name for name in names if not name.startswith(".")]
        target = tree / Path(folder).relative_to(checkout)
        target.mkdir(parents=True)
        for name in files:
            path = Path(folder, name)
            if (
                any(Path(name).match(pattern) for pattern in KEPT)
                and not path.is_symlink()
                and path.stat().st_size < 2**18
            ):
                text = path.read_text(encoding="utf-8", errors="replace")
                (target / name).write_text(TO_A_LOG.sub("", text) if name.endswith(".sh") else text, encoding="utf-8")


def _make_programs(folder: Path) -> None:
    folder.mkdir()
    for name in REAL.split():
        real = shutil.which(name)
        if real is not None:
            (folder / name).symlink_to(real)
    # A command is its words with a NUL after each, then \1 and the end of the line.
    record = '#!/bin/bash\nprintf "%s\\0" "$0" "$@" >> "$RECORD"\nprintf "\\1\\n" >> "$RECORD"\n'
    for name in LAUNCHERS.split():
        _write_program(folder / name, record)
    devices = "\\n".join(["GPU"] * GPUS)
    _write_program(folder / "nvidia-smi", f'#!/bin/bash\nprintf "{devices}\\n"\n')
    # Two lines of its own stand before those of the command that it runs on every host.
    _write_program(folder / "ds_ssh", f'#!/bin/bash\nprintf "hosts\\nfirst\\n{devices}\\n"\n')
    inside = '[[ "$each" != /* && "$each" != -* && "$each" != *..* ]]'
    mkdir = shutil.which("mkdir")
    _write_program(
        folder / "mkdir", f'#!/bin/bash\nfor each in "$@"; do {inside} && {mkdir} -p "$each"; done\nexit 0\n'
    )
    for name, does in {"whoami": "echo user", "hostname": "echo worker-0", "ssh": "exit 1"}.items():
        _write_program(folder / name, f"#!/bin/bash\n{does}\n")
    (folder / "environment").write_text("command_not_found_handle() { return 0; }\n")


def _write_program(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
