"""`terapipe completion`: scripts with which shells complete commands, flags, names and files."""

import argparse
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

from deepspeed_ext.plan.schedules import OPTIMISED, SCHEDULES
from deepspeed_ext.plan.terminal import CommandParser, command_main
from megatron_terapipe.command.main import tree
from megatron_terapipe.config.presets import MODEL_PRESETS
from megatron_terapipe.devices import DEVICES
from megatron_terapipe.errors import ConfigError

PROGRAM = "terapipe"

SHELLS = ("bash", "zsh")

DESCRIPTION = """\
Print a script with which your shell completes commands, flags, their values and files.

The script is made once, for the flags of this version; make it again after an update."""

EPILOG = """\
examples:
  %(prog)s bash > ~/.local/share/bash-completion/completions/terapipe
  %(prog)s zsh > ~/.zfunc/_terapipe        # with `fpath+=~/.zfunc` before `compinit` in ~/.zshrc

To try it in this shell: source <(%(prog)s bash)"""

FILES = re.compile(r"(FILE|PATH|PREFIX|CONFIG|CLUSTER)\b|\.jsonl?$")
"""Names of values that are files, in help texts."""

FOLDERS = re.compile(r"^(DIR|CHECKPOINTS|HF_DIR)\b")

NAMES_OR_FILES = {
    "bash": '  compgen -W "{words}" -- "$1"\n  compgen -f -- "$1"',
    "zsh": '  _alternative "names:name:({words})" "files:file:_files"',
}
"""Body of the function that completes a value that is one of some words, or a file."""


def build_parser(prog: str) -> CommandParser:
    """Return the parser of the command; `prog` is the command as users type it."""
    parser = CommandParser(prog=prog, description=DESCRIPTION, epilog=EPILOG)
    group = parser.add_argument_group("shell")
    group.add_argument("shell", choices=SHELLS, help="your shell: bash or zsh")
    return parser


def _run(options: argparse.Namespace, prog: str) -> int:
    print(script(options.shell))
    return 0


main = command_main(build_parser, _run, "python -m megatron_terapipe completion")


def script(shell: str) -> str:
    """Return the script for a shell.

    Raises:
        ConfigError: if shtab, which writes it, is not installed.
    """
    if find_spec("shtab") is None:
        raise ConfigError("completion needs the package shtab, which is not installed: pip install shtab")
    import shtab

    parser, names = tree(PROGRAM), names_of_values()
    functions: dict[str, str] = {}
    for action in actions_of(parser):
        metavar = str(action.metavar or "")
        if action.nargs != 0:
            # zsh reads a colon as the end of the value's name.
            action.metavar = re.sub(r"\W", "", metavar) or action.dest
        if metavar.startswith("{"):
            # The parser of the trainer checks its values later, and shows them only.
            action.choices = metavar.strip("{}").split(",")
        named = next((each for each in (*action.option_strings, metavar) if each in names), None)
        if named is not None:
            function, words = re.sub(r"\W", "_", f"_{PROGRAM}_{named.strip('-')}"), " ".join(names[named])
            action.complete = {shell: function}  # type: ignore[attr-defined]
            functions[function] = f"{function}() {{\n{NAMES_OR_FILES[shell].format(words=words)}\n}}"
        elif FOLDERS.search(metavar):
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif FILES.search(metavar) or action.type is Path:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    return str(shtab.complete(parser, shell, preamble="\n".join(functions.values())))


def names_of_values() -> Mapping[str, tuple[str, ...]]:
    """Return the names that complete a value, by the metavar of the value or by its flag."""
    # Imported here, for these names alone.
    from megatron_terapipe.search.machine.library import MACHINES
    from megatron_terapipe.search.machine.trainers import SOFTWARE

    schedules = (*SCHEDULES, OPTIMISED)
    return {
        "MODEL": tuple(MODEL_PRESETS),
        "--model-preset": tuple(MODEL_PRESETS),
        "--schedule": schedules,
        "--pipeline-schedule": schedules,
        "--device": (*DEVICES, *MACHINES),
        "--software": tuple(SOFTWARE),
    }


def actions_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the flags and positional words of a parser and of all its sub-commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from chain.from_iterable(map(actions_of, action.choices.values()))
        else:
            yield action
