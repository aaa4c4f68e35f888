"""`terapipe schema`: the JSON Schema of a file that users write, from the class that reads it."""

import argparse
import json
import sys
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

from deepspeed_ext.plan.terminal import CommandParser, command_main


class FileFormat(NamedTuple):
    """A kind of file."""

    summary: str
    """Purpose of the file, and the flag that reads it."""
    source: str
    """Its declaration, as `module:name`: a pydantic class, or a function that returns the JSON Schema."""

    def json_schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the file, or of one of its lines."""
        module, name = self.source.split(":")
        declared: Any = getattr(import_module(module), name)
        schema = declared.model_json_schema() if hasattr(declared, "model_json_schema") else declared()
        return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


_SEARCH = "megatron_terapipe.search"

FILE_FORMATS: Mapping[str, FileFormat] = MappingProxyType(
    {
        "model": FileFormat(
            "Model of the search: fields of the trainer's model section, or a preset and fields that differ.",
            f"{_SEARCH}.price.workload_files:model_schema",
        ),
        "layers": FileFormat("Model of the search, layer by layer.", f"{_SEARCH}.price.workload_files:LayeredEntry"),
        "cluster": FileFormat(
            "Cluster of the search and of `--cluster`.", f"{_SEARCH}.machine.cluster_files:ClusterEntry"
        ),
        "profile": FileFormat(
            "Measured times, which `terapipe search measure --json` writes and `--profile` reads.",
            f"{_SEARCH}.price.profile:Profile",
        ),
        "strategy": FileFormat(
            "A strategy, which `terapipe search rank --output` writes and `--strategy` reads; in files of "
            "`--strategies` one on each line. Fields that are left out have their defaults.",
            "megatron_terapipe.strategy:strategy_schema",
        ),
        "trial": FileFormat(
            "One line of a file of trials: a measured run, for `validate` and `--calibrate`.",
            f"{_SEARCH}.learn.trials:TrialEntry",
        ),
        "trainers": FileFormat(
            "Trainers of trials, which `--trainers` of `terapipe search validate` reads.",
            f"{_SEARCH}.machine.trainer_files:TrainersEntry",
        ),
    }
)
"""All of them, by the name that `terapipe schema` takes."""


DESCRIPTION = """Print the JSON Schema of a kind of file that you write, with which editors and scripts check it; or
list all kinds."""

EPILOG = """examples:
  %(prog)s
  %(prog)s cluster > cluster.schema.json

Read on: docs/reference/files.md, the same as tables."""


def build_parser(prog: str) -> CommandParser:
    """Return the parser of the command; `prog` is the command as users type it."""
    parser = CommandParser(prog=prog, description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("file", nargs="?", choices=FILE_FORMATS, help="kind of file; list all if left out")
    return parser


def _run(options: argparse.Namespace, prog: str) -> int:
    name = options.file
    if name is None:
        width = max(map(len, FILE_FORMATS))
        print(*(f"{name:<{width}}  {form.summary.replace('`', '')}" for name, form in FILE_FORMATS.items()), sep="\n")
    else:
        print(json.dumps(FILE_FORMATS[name].json_schema(), indent=1))
    return 0


main = command_main(build_parser, _run, "python -m megatron_terapipe.command.schema")

if __name__ == "__main__":
    sys.exit(main())
