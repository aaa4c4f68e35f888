"""The table of the files that users write or read, each with its JSON Schema."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class FileFormat:
    """A kind of file."""

    summary: str
    """What the file is, and which flag reads or writes it."""
    source: str
    """Where its form is stated, as `module:name`: a class that reads or writes it, or a function that returns the JSON
    Schema."""

    def json_schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the file, or of one of its lines."""
        # Imported here: pydantic would make --help wait.
        module, name = self.source.split(":")
        stated: Any = getattr(import_module(module), name)
        schema = stated.model_json_schema() if hasattr(stated, "model_json_schema") else stated()
        return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


_SEARCH = "megatron_terapipe.search"
_HERE = "megatron_terapipe.file_formats"

FILE_FORMATS: Mapping[str, FileFormat] = MappingProxyType(
    {
        "answer": FileFormat(
            "Answer of `terapipe search rank`, `predict`, `slices` and `trial`, which `--json` writes.",
            f"{_SEARCH}.report.schema.schema:json_schema",
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
        "strategy": FileFormat(
            "A strategy, which `terapipe search rank --output` writes and `--strategy` reads; in files of "
            "`--strategies` one on each line. Fields that are left out have their defaults.",
            "megatron_terapipe.strategy:strategy_schema",
        ),
        "trial": FileFormat(
            "One line of a file of trials: a measured run, for `validate` and `--calibrate`.",
            f"{_SEARCH}.trials.read:TrialEntry",
        ),
        "calibration": FileFormat(
            "Constants fitted to trials, which `--save-calibration` writes and `--calibrate` reads.",
            f"{_SEARCH}.trials.calibration.calibration_files:CalibrationsEntry",
        ),
        "costs": FileFormat(
            "Times of ops and transfers, which `--costs` of `terapipe plan` reads.", f"{_HERE}.plan_inputs:costs_schema"
        ),
        "token-bytes": FileFormat(
            "Bytes that a token keeps, which `--token-bytes` of `terapipe plan` reads.",
            f"{_HERE}.plan_inputs:token_bytes_schema",
        ),
        "partition": FileFormat(
            "Layers of the stages, which `--stage-partition` of the trainer reads.",
            f"{_HERE}.plan_inputs:partition_schema",
        ),
        "plan": FileFormat(
            "Answer of `terapipe plan`, which `--json` writes and its `--timeline` reads.",
            f"{_HERE}.timelines:plan_schema",
        ),
        "timeline": FileFormat(
            "A measured step, which `--timeline` of the trainer writes and `--timeline` of `terapipe plan` reads.",
            f"{_HERE}.timelines:timeline_schema",
        ),
        "trace": FileFormat(
            "A timeline for Perfetto and chrome://tracing: `--trace` of `terapipe plan` writes one, and so does a run "
            "beside its measured steps.",
            f"{_HERE}.chrome_trace:trace_schema",
        ),
        "metrics": FileFormat(
            "One line of the file of `--metrics-file`: an iteration, an evaluation or an event.",
            "megatron_terapipe.run_report.metrics_schema:metrics_schema",
        ),
        "report": FileFormat(
            "Figures of training runs, which `terapipe report --json` writes.",
            "megatron_terapipe.run_report.output.schema:json_schema",
        ),
        "ledger": FileFormat(
            "What a rank had done, did and waited for when its run stood still: `rank_00000.json` in the directory of "
            "`--ledger-directory`.",
            f"{_HERE}.run_files:ledger_schema",
        ),
        "run": FileFormat(
            "The run that saved a checkpoint: `run.json` in its directory.", f"{_HERE}.run_files:run_schema"
        ),
        "manifest": FileFormat(
            "Size and hash of every other file of a checkpoint: `manifest.json` in its directory.",
            f"{_HERE}.run_files:manifest_schema",
        ),
        "tokenizer": FileFormat(
            "The tokenizer that data was written with: `PREFIX.tokenizer.json`, which `terapipe preprocess` writes and "
            "the trainer reads.",
            f"{_HERE}.run_files:tokenizer_schema",
        ),
        "preprocessed": FileFormat(
            "Answer of `terapipe preprocess`, which `--json` writes.", f"{_HERE}.answers:preprocessed_schema"
        ),
        "converted": FileFormat(
            "Answer of `terapipe convert`, which `--json` writes.", f"{_HERE}.answers:converted_schema"
        ),
        "generated": FileFormat(
            "Answer of `terapipe generate`, which `--json` writes.", f"{_HERE}.answers:generated_schema"
        ),
        "doctor": FileFormat("What `terapipe doctor --json` found.", "megatron_terapipe.doctor.document:json_schema"),
    }
)
"""All of them, by the name that `terapipe schema` takes."""
