"""The files that users write or read, each with its JSON Schema, made from the code that reads or writes it."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class FileFormat:
    """A kind of file.

    Attributes:
        summary: what the file is, and which flag reads or writes it.
        source: where its form is stated, as `module:name`: a class that reads or writes it, or a function that
            returns the JSON Schema.
    """

    summary: str
    source: str

    def json_schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the file, or of one of its lines."""
        # Imported here: pydantic would make --help wait.
        module, name = self.source.split(":")
        stated: Any = getattr(import_module(module), name)
        schema = stated.model_json_schema() if hasattr(stated, "model_json_schema") else stated()
        return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


_SEARCH = "megatron_terapipe.search"

FILE_FORMATS: Mapping[str, FileFormat] = MappingProxyType(
    {
        "answer": FileFormat(
            "Answer of `terapipe search rank`, `predict`, `slices` and `trial`, which `--json` writes.",
            f"{_SEARCH}.report.schema:json_schema",
        ),
        "model": FileFormat(
            "Model of the search: fields of the trainer's model section, or a preset and what is other than it says.",
            f"{_SEARCH}.inputs.workload_files:model_schema",
        ),
        "layers": FileFormat("Model of the search, layer by layer.", f"{_SEARCH}.inputs.workload_files:LayeredEntry"),
        "cluster": FileFormat(
            "Cluster of the search and of `--cluster`.", f"{_SEARCH}.inputs.node_entries:ClusterEntry"
        ),
        "flat-cluster": FileFormat(
            "Cluster of equal nodes in a few flat fields, as lines of trials have it.",
            f"{_SEARCH}.inputs.cluster_files:FlatCluster",
        ),
        "profile": FileFormat(
            "Measured times, which `terapipe search measure --json` writes and `--profile` reads.",
            f"{_SEARCH}.op_times.profile_files:ProfileEntry",
        ),
        "trial": FileFormat(
            "One line of a file of trials: a measured run, for `validate` and `--calibrate`.",
            f"{_SEARCH}.trials.read:TrialEntry",
        ),
        "calibration": FileFormat(
            "Constants fitted to trials, which `--save-calibration` writes and `--calibrate` reads.",
            f"{_SEARCH}.trials.calibration_files:CalibrationsEntry",
        ),
        "metrics": FileFormat(
            "One line of the file of `--metrics-file`: an iteration, an evaluation or an event.",
            "megatron_terapipe.run_report.metrics_schema:metrics_schema",
        ),
        "report": FileFormat(
            "Figures of training runs, which `terapipe report --json` writes.",
            "megatron_terapipe.run_report.schema:json_schema",
        ),
        "doctor": FileFormat("What `terapipe doctor --json` found.", "megatron_terapipe.doctor.document:json_schema"),
    }
)
"""All of them, by the name that `terapipe search schema` takes."""
