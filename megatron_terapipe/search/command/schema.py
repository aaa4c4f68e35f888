"""Command `schema`: the JSON Schema of the answers."""

import argparse
import json

HELP = "Print the JSON Schema of the answers that commands write with --json."

EXAMPLES = """\
examples:
  %(prog)s > answers.schema.json"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add no flags: there is one schema."""


def run(options: argparse.Namespace) -> int:
    """Print the schema, and return 0."""
    # Imported here: pydantic would make --help wait.
    from megatron_terapipe.search.report.schema import json_schema

    print(json.dumps(json_schema(), indent=1))
    return 0
