"""`terapipe neox`: prints the command for the training that GPT-NeoX's files describe.

The words are as for its launcher, `deepy.py train.py -d configs 125M local_setup`; the first two may be left out.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.terminal import CommandParser, run_command
from deepspeed_ext.plan.text_files import write_text
from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.neox.convert import BEFORE_2023_12, SINCE_2023_12, Conversion, convert, paths_of, read_settings
from megatron_terapipe.planning import slots_of_hosts

LAUNCHER, SCRIPT = "deepy.py", "train.py"
"""NeoX's launcher, and the only one of its programs that has a counterpart here."""

OVERRIDING = ("wandb_project", "wandb_group", "wandb_run_name", "wandb_team")
"""Settings that NeoX's launcher also takes as flags."""


DESCRIPTION = """\
Turn files of GPT-NeoX into a command that trains the same model here.

The words are as for NeoX's launcher, `deepy.py train.py -d configs 125M local_setup`; the first two may be left out.
A setting that changes the training, and has no counterpart here, ends the command."""

EPILOG = """\
examples:
  %(prog)s train.py -d configs 125M local_setup
  %(prog)s configs/125M.yml configs/local_setup.yml --world-size 8 --output train.sh

Read on: docs/how-to/migrating.md."""


def main(argv: Sequence[str] | None = None, prog: str = "python -m megatron_terapipe.neox") -> int:
    """Convert, print, report settings left out; return the exit code: 2 for bad input or a refused setting."""
    return run_command(lambda: _run(argv, prog))


def _run(argv: Sequence[str] | None, prog: str) -> int:
    # Intermixed: the directory may come between the program and the files, as in `train.py -d configs 125M`.
    options = build_parser(prog).parse_intermixed_args(argv)
    if options.world_size is not None and options.world_size < 1:
        raise ConfigError(f"--world-size {options.world_size} is not positive: give 1 or more")
    settings = read_settings(paths_of(_files(options.files), options.conf_dir))
    settings |= {key: value for key in OVERRIDING if (value := getattr(options, key)) is not None}
    defaults = BEFORE_2023_12 if options.defaults_before_2023_12 else SINCE_2023_12
    conversion = convert(settings, options.world_size or _slots(settings), defaults=defaults)
    # A value with a line break must not end a comment of the script: what follows would be a command.
    comments = [" ".join(each.split()) for each in (*conversion.comments(), *_unfinished(conversion))]
    text = "".join(f"# {comment}\n" for comment in comments) + conversion.command()
    if options.output is None:
        print(text, end="")
    else:
        write_text(options.output, text, "--output")
    for comment in comments:
        print(comment, file=sys.stderr)
    return 0


def build_parser(prog: str) -> CommandParser:
    """Return the parser of the command; `prog` is the command as users type it."""
    parser = CommandParser(prog=prog, description=DESCRIPTION, epilog=EPILOG)
    group = parser.add_argument_group("files")
    group.add_argument(
        "files", nargs="+", metavar="CONFIG", help="configuration files of NeoX, which are merged; .yml may be left out"
    )
    group.add_argument("-d", "--conf_dir", "--conf-dir", metavar="DIR", help="directory of the configuration files")
    group.add_argument("--output", metavar="FILE", help="write the command to a file instead of printing it")
    settings = parser.add_argument_group("settings that the files leave open")
    settings.add_argument(
        "--world-size",
        type=int,
        metavar="N",
        help="number of processes, if the batch size depends on it. Default: the slots of the hostfile, if it is here",
    )
    for key in OVERRIDING:
        settings.add_argument(f"--{key}", metavar="NAME", help=f"{key} instead of the one in the files")
    settings.add_argument(
        "--defaults-before-2023-12",
        action="store_true",
        help="settings that the files leave out have the defaults that NeoX had before December 2023: dropout 0.1 and "
        "weight decay 0.01 instead of 0 and 0.1",
    )
    return parser


def _files(words: list[str]) -> list[str]:
    """Return the files without the program that NeoX's launcher would start."""
    if Path(words[0]).name == LAUNCHER:
        words = words[1:] or [SCRIPT]
    script, files = (words[0], words[1:]) if words[0].endswith(".py") else (SCRIPT, words)
    if Path(script).name != SCRIPT:
        raise ConfigError(f"{script} does not train: name {SCRIPT}, or only the configuration files")
    if not files:
        raise ConfigError(f"{script} has no configuration: name files such as 125M.yml local_setup.yml")
    return files


def _slots(settings: Mapping[str, Any]) -> int | None:
    """Return the processes that NeoX would start on the hosts of its hostfile; None if that is not here."""
    path = settings.get("hostfile")
    if not isinstance(path, str) or not Path(path).is_file() or settings.get("include") or settings.get("exclude"):
        return None
    slots = slots_of_hosts(path, "hostfile")
    hosts, devices = (settings.get(key) or 0 for key in ("num_nodes", "num_gpus"))
    used = slots[:hosts] if hosts > 0 else slots
    return devices * len(used) if devices > 0 else sum(used)


def _unfinished(conversion: Conversion) -> list[str]:
    """Return the trainer's error about the command, for example if a file has only the model; none if it has none."""
    try:
        parse_arguments(conversion.words())
    except UserError as error:
        return [f"the trainer does not take this as it is: {error}"]
    return []


if __name__ == "__main__":
    sys.exit(main())
