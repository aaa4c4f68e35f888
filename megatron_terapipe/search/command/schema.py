"""Command `schema`: the JSON Schema of a kind of file."""

import argparse
import json

from megatron_terapipe.search.command.file_formats import FILE_FORMATS

HELP = "Print the JSON Schema of an answer, or of another file that users write or read."

EXAMPLES = """\
examples:
  %(prog)s > answer.schema.json
  %(prog)s cluster > cluster.schema.json"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the kind of file."""
    parser.add_argument(
        "file", nargs="?", choices=FILE_FORMATS, default="answer", help="kind of file; answer if left out"
    )


def run(options: argparse.Namespace) -> int:
    """Print the schema, and return 0."""
    print(json.dumps(FILE_FORMATS[options.file].json_schema(), indent=1))
    return 0
