"""Command `terapipe search`: the strategies of a model on a cluster, with their time and memory."""

import sys
from collections.abc import Iterable, Sequence
from importlib import import_module

from deepspeed_ext.plan.terminal import CommandParser, run_command
from megatron_terapipe.command.main import SEARCH
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.machine.documents import suggestion

DESCRIPTION = """\
Find out how to train a model on a cluster: which strategy, how long an iteration takes, how much memory it needs."""

EPILOG = """\
examples:
  %(prog)s rank gpt3-13b examples/clusters/a100-64.json --global-batch-size 64
  %(prog)s rank model.json hostfile --device A100-80GB --global-batch-size 512

Models are presets or JSON files; clusters are JSON, YAML or hostfiles. Each command has its own --help. Read on:
docs/how-to/search.md."""

COMMANDS = {part.name: part for part in SEARCH.parts}
"""The commands by name."""


def main(argv: Sequence[str] | None = None, prog: str = "python -m megatron_terapipe.search") -> int:
    """Run a command and return its exit code: 2 for bad input, with one line of error."""
    words = sys.argv[1:] if argv is None else list(argv)
    return run_command(lambda: _run(words, prog))


def _run(words: list[str], prog: str) -> int:
    name = next((word for word in words if not word.startswith("-")), None)
    if name is not None and name not in COMMANDS:
        raise ConfigError(f"command {name!r} is not known: {suggestion(name, COMMANDS)}")
    # Only this one is imported: no command waits for the imports of another.
    options = _parser(prog, [name]).parse_args(words)
    return int(options.run(options))


def build_parser(prog: str) -> CommandParser:
    """Return the parser of all commands; `prog`: the words before them."""
    return _parser(prog, COMMANDS)


def _parser(prog: str, imported: Iterable[str | None]) -> CommandParser:
    """Return a parser that lists all commands, and has the flags of some.

    The module of a command has HELP, EXAMPLES, `add_flags(parser)` and `run(options)`.
    """
    parser = CommandParser(prog=prog, description=DESCRIPTION, epilog=EPILOG)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, part in COMMANDS.items():
        command = commands.add_parser(name, help=part.summary)
        if name in imported:
            module = import_module(part.module)
            command.description = module.HELP
            command.epilog = f"{module.EXAMPLES.rstrip()}\n\nRead on: docs/how-to/search.md."
            command.set_defaults(run=module.run)
            module.add_flags(command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
