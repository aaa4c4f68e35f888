"""Command `terapipe search`: the strategies of a model on a cluster, with their time and memory."""

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType

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
    with _rare_collections():
        return run_command(lambda: _run(words, prog))


MANY_OBJECTS = 100_000
"""New objects after which garbage is collected."""


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Collect garbage less often: plans of host copies make a million tuples that live, and collections walk them."""
    usual = gc.get_threshold()
    gc.set_threshold(MANY_OBJECTS, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def _run(words: list[str], prog: str) -> int:
    if not words or words[0].startswith("-"):
        _overview(prog)[0].parse_args(words)
        raise ConfigError(f"no command is named: choose among {', '.join(COMMANDS)}, or see {prog} --help")
    name, *rest = words
    if name not in COMMANDS:
        raise ConfigError(f"command {name!r} is not known: {suggestion(name, COMMANDS)}")
    # Only this one is imported: no command waits for the imports of another.
    parser = CommandParser(prog=f"{prog} {name}")
    return int(_completed(parser, name).run(parser.parse_args(rest)))


def build_parser(prog: str) -> CommandParser:
    """Return the parser of all commands; `prog`: the words before them."""
    parser, parts = _overview(prog)
    for name, part in parts.items():
        _completed(part, name)
    return parser


def _overview(prog: str) -> tuple[CommandParser, dict[str, CommandParser]]:
    """The parser that lists the commands, and a parser of each command, which has no flags yet."""
    parser = CommandParser(prog=prog, description=DESCRIPTION, epilog=EPILOG)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    return parser, {name: commands.add_parser(name, help=part.summary) for name, part in COMMANDS.items()}


def _completed(parser: CommandParser, name: str) -> ModuleType:
    """Complete a command's parser by its module, which has HELP, EXAMPLES, `add_flags(parser)` and `run(options)`."""
    module = import_module(COMMANDS[name].module)
    parser.description, parser.epilog = module.HELP, f"{module.EXAMPLES.rstrip()}\n\nRead on: docs/how-to/search.md."
    module.add_flags(parser)
    return module


if __name__ == "__main__":
    sys.exit(main())
