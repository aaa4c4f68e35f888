"""The files that users write or read, each with its JSON Schema, and the command `schema`, which prints one.

Schemas come from the classes that read or write the files. They are closed: a new key fails the tests that compare them
with real files.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any

from deepspeed_ext.plan.terminal import CommandParser, command_main


@dataclass(frozen=True, slots=True)
class FileFormat:
    """A kind of file."""

    summary: str
    """Purpose of the file, and the flag that reads or writes it."""
    source: str
    """Where its form is declared, as `module:name`: a class, or a function that returns the JSON Schema."""
    whole: bool = True
    """Whether all keys of a dataclass are in every file; else those with a default may be left out."""

    def json_schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the file, or of one of its lines."""
        # Imported here: pydantic would make --help wait.
        from megatron_terapipe.class_schema import class_schema

        module, name = self.source.split(":")
        stated: Any = getattr(import_module(module), name)
        schema = class_schema(stated, whole=self.whole) if isinstance(stated, type) else stated()
        return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


_SEARCH = "megatron_terapipe.search"
_HERE = "megatron_terapipe.file_formats"

FILE_FORMATS: Mapping[str, FileFormat] = MappingProxyType(
    {
        "answer": FileFormat(
            "Answer of `terapipe search rank`, `predict`, `slices` and `trial`, which `--json` writes.",
            f"{_SEARCH}.answer.json_schema:json_schema",
        ),
        "model": FileFormat(
            "Model of the search: fields of the trainer's model section, or a preset and fields that differ.",
            f"{_SEARCH}.price.workload_files:model_schema",
        ),
        "layers": FileFormat("Model of the search, layer by layer.", f"{_SEARCH}.price.workload_files:LayeredEntry"),
        "cluster": FileFormat(
            "Cluster of the search and of `--cluster`.", f"{_SEARCH}.machine.cluster_files:ClusterEntry"
        ),
        "trainers": FileFormat(
            "Trainers of trials, which `--trainers` of `terapipe search validate` reads.",
            f"{_SEARCH}.learn.trainers_file:TrainersEntry",
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
        "calibration": FileFormat(
            "Constants fitted to trials, which `--save-calibration` writes and `--calibrate` reads.",
            f"{_SEARCH}.learn.cluster_calibrations:CalibrationsEntry",
        ),
        "costs": FileFormat(
            "Times of ops and transfers, which `--costs` of `terapipe plan` reads.", f"{_HERE}.descriptions:CostsFile"
        ),
        "token-bytes": FileFormat(
            "Bytes that a token keeps, which `--token-bytes` of `terapipe plan` reads.",
            f"{_HERE}.descriptions:TokenBytesFile",
        ),
        "partition": FileFormat(
            "Layers of the stages, which `--stage-partition` of the trainer reads.",
            f"{_HERE}.descriptions:partition_schema",
        ),
        "plan": FileFormat(
            "Answer of `terapipe plan`, which `--json` writes and its `--timeline` reads.",
            f"{_HERE}.descriptions:plan_schema",
        ),
        "timeline": FileFormat(
            "A measured step, which `--timeline` of the trainer writes and `--timeline` of `terapipe plan` reads.",
            f"{_HERE}.descriptions:TimelineFile",
        ),
        "metrics": FileFormat(
            "One line of the file of `--metrics-file`: an iteration, an evaluation or an event.",
            "megatron_terapipe.run_report.metrics_file:metrics_schema",
        ),
        "report": FileFormat(
            "Figures of training runs, which `terapipe report --json` writes.",
            "megatron_terapipe.run_report.report:ReportDocument",
        ),
        "run": FileFormat(
            "The run that saved a checkpoint: `run.json` in its directory. Earlier versions did not write all keys.",
            "megatron_terapipe.checkpoint.info:CheckpointInfo",
            whole=False,
        ),
        "preprocessed": FileFormat(
            "Answer of `terapipe preprocess`, which `--json` writes.", "megatron_terapipe.data.preprocess:Written"
        ),
        "converted": FileFormat(
            "Answer of `terapipe convert`, which `--json` writes.", "megatron_terapipe.convert:Converted"
        ),
        "generated": FileFormat(
            "Answer of `terapipe generate`, which `--json` writes.", "megatron_terapipe.generate:Generated"
        ),
        "doctor": FileFormat(
            "Answer of `terapipe doctor`, which `--json` writes.", "megatron_terapipe.doctor.report:Document"
        ),
    }
)
"""All of them, by the name that `terapipe schema` takes."""


DESCRIPTION = """Print the JSON Schema of a kind of file that you write or read, with which editors and scripts check
it; or list all kinds."""

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


main = command_main(build_parser, _run, "python -m megatron_terapipe.file_formats.table")

if __name__ == "__main__":
    sys.exit(main())
