"""Command `search schema`: that of the answer, or what `terapipe schema` prints."""

import argparse
import json

from megatron_terapipe.file_formats.table import FILE_FORMATS

HELP = "Print the JSON Schema of the answer, or of another file, as `terapipe schema` does."

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
