"""Command `python -m megatron_terapipe.search`: how to train a model on a cluster, and what it will cost."""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Protocol, cast

from deepspeed_ext.plan.errors import UserError
from megatron_terapipe.command_parser import CommandParser
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.inputs.documents import suggestion

PROGRAM = "python -m megatron_terapipe.search"

COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "rank": "find the best strategies of a model on a cluster, and explain why",
        "predict": "predict time and memory of strategies that you name",
        "slices": "find the best token slices of one strategy",
        "validate": "compare predictions with measured trials",
        "measure": "measure ops and links of this machine, for --profile",
        "trial": "run the best strategies, record them, and calibrate",
        "schema": "print the JSON Schema of answers",
    }
)
"""Every command, and what it is for. Each is a module of the package `command`, of the same name."""

EPILOG = """
examples:
  python -m megatron_terapipe.search rank gpt3-13b examples/clusters/a100-64.json --global-batch-size 64
  python -m megatron_terapipe.search rank model.json hostfile --device A100-80GB --global-batch-size 512

Models are presets or JSON files, clusters are JSON, YAML or hostfiles: docs/how-to/search.md. Each command has its own
--help.
"""


class Command(Protocol):
    """The contents of a command's module."""

    HELP: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def run_command(argv: Sequence[str]) -> int:
    """Run the command that words name, and return its exit code.

    Args:
        argv: words behind the name of the program.

    Raises:
        ConfigError: if there is no such command, or a flag is wrong.
        SystemExit: only for `--help`.
    """
    name = argv[0] if argv else None
    if name is None or name.startswith("-"):
        _overview().parse_args(argv)
        raise ConfigError(f"no command is named: choose among {', '.join(COMMANDS)}, or see {PROGRAM} --help")
    if name not in COMMANDS:
        raise ConfigError(f"command {name!r} is not known: {suggestion(name, COMMANDS)}")
    command = _command(name)
    parser = CommandParser(
        prog=f"{PROGRAM} {name}",
        description=command.HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_flags(parser)
    return command.run(parser.parse_args(argv[1:]))


def _command(name: str) -> Command:
    return cast(Command, import_module(f"megatron_terapipe.search.command.{name}"))


def _overview() -> CommandParser:
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:<{width}}  {what}" for name, what in COMMANDS.items())
    return CommandParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} COMMAND [flags]",
        description=f"Find out how to train a model on a cluster.\n\ncommands:\n{listed}",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


INTERRUPTED = 130
"""Exit code of a command that ended by Ctrl-C, as shells know it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 2 for bad input, said in one line."""
    try:
        return run_command(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    except BrokenPipeError:
        # What reads the output, such as `head`, has enough. Python would complain again when it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
