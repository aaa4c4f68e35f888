"""Command `schema`: the JSON Schema of a kind of file."""

import json
import sys
from collections.abc import Sequence

from deepspeed_ext.plan.text.command_line import CommandParser, run_command
from megatron_terapipe.file_formats.table import FILE_FORMATS

DESCRIPTION = """Print the JSON Schema of a kind of file that you write or read, with which editors and scripts check
it; or list all kinds."""

EPILOG = """examples:
  %(prog)s
  %(prog)s cluster > cluster.schema.json

Read on: docs/reference/files.md, the same as tables."""


def build_parser(prog: str) -> CommandParser:
    """Return the parser of the command; `prog` is what people type before its flags."""
    parser = CommandParser(prog=prog, description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("file", nargs="?", choices=FILE_FORMATS, help="kind of file; list all if left out")
    return parser


def main(argv: Sequence[str] | None = None, prog: str = "python -m megatron_terapipe.command.schema") -> int:
    """Print what is asked for, and return the exit code: 2 for bad input, said in one line.

    Args:
        argv: words that people type; None = those of this process.
        prog: what they type before them.

    Raises:
        SystemExit: only for `--help`.
    """
    return run_command(lambda: _run(build_parser(prog).parse_args(argv).file))


def _run(name: str | None) -> int:
    if name is None:
        width = max(map(len, FILE_FORMATS))
        print(*(f"{name:<{width}}  {form.summary.replace('`', '')}" for name, form in FILE_FORMATS.items()), sep="\n")
    else:
        print(json.dumps(FILE_FORMATS[name].json_schema(), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
