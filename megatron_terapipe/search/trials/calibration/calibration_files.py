"""Calibration files: constants that trials once gave, kept for later runs of the search."""

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, create_model, model_validator

from deepspeed_ext.plan.text.text_files import write_text
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.cost.memory.overheads import MemoryOverheads
from megatron_terapipe.search.inputs.cluster import Cluster
from megatron_terapipe.search.inputs.documents import read_document
from megatron_terapipe.search.inputs.entries import CountOrNone, Entry, NotNegative, Positive, Text, fixed, read_entry
from megatron_terapipe.search.op_times.constants import Prior
from megatron_terapipe.search.op_times.hardware_efficiency import HardwareEfficiency
from megatron_terapipe.search.op_times.profile import Profile
from megatron_terapipe.search.trials.calibration.calibration import Calibration, on_several_nodes
from megatron_terapipe.search.trials.calibration.cluster_calibrations import Calibrations
from megatron_terapipe.search.trials.calibration.intervals import Intervals
from megatron_terapipe.search.trials.read import read_trials
from megatron_terapipe.search.trials.trial import Trial

FORMAT, VERSION = "terapipe calibration", 2


def write_calibrations(path: str, calibrations: Sequence[Calibration]) -> None:
    """Write a calibration file.

    Raises:
        UserError: if it cannot be written.
    """
    document = {"format": FORMAT, "version": VERSION, "calibrations": [_to_json(one) for one in calibrations]}
    write_text(path, json.dumps(document, indent=1) + "\n")


def _row_of(number: int) -> Any:
    return Annotated[list[Positive], Field(min_length=number, max_length=number)]


def _constants(declaring: type) -> Any:
    """An entry with the constants that a dataclass declares, and rows of factors."""
    constants: dict[str, Any] = {
        each.name: (_row_of(len(each.default)) if isinstance(each.default, tuple) else NotNegative, ...)
        for each in fields(declaring)
    }
    return create_model(declaring.__name__, __base__=Entry, **constants)


class IntervalsEntry(Entry):
    """Intervals of predicted times."""

    coverage: Positive
    multiplier: Positive
    residual_sd: Positive
    parameter_names: list[Literal[Prior.of(HardwareEfficiency()).names]]  # type: ignore[valid-type]
    covariance: list[list[float]]

    @model_validator(mode="after")
    def _is_square(self) -> "IntervalsEntry":
        size = len(self.parameter_names)
        if len(self.covariance) != size or any(len(row) != size for row in self.covariance):
            raise ValueError(f"has a covariance that is not a table of {size} x {size} numbers: calibrate again")
        return self


class CalibrationEntry(Entry):
    """Constants of one cluster."""

    source: str = ""
    device: Text
    several_nodes: bool | None = None
    num_trials: CountOrNone
    num_memory_trials: CountOrNone
    physics: _constants(HardwareEfficiency)  # type: ignore[valid-type]
    memory_physics: _constants(MemoryOverheads) | None = None  # type: ignore[valid-type]
    memory_sd: NotNegative
    intervals: IntervalsEntry


class CalibrationsEntry(Entry):
    """A calibration file."""

    format: Annotated[str, fixed(FORMAT, "give a file that --save-calibration wrote")]
    version: Annotated[int, fixed(VERSION, "calibrate again with this version")]
    calibrations: list[CalibrationEntry] = Field(min_length=1)


def read_calibrations(path: str) -> list[Calibration]:
    """Read a calibration file.

    Raises:
        UserError: if it is none, or a field is wrong.
    """
    return [
        Calibration(
            source=one.source,
            device=one.device,
            several_nodes=one.several_nodes,
            num_trials=one.num_trials,
            num_memory_trials=one.num_memory_trials,
            efficiency=_efficiency(one),
            memory_overheads=one.memory_physics and MemoryOverheads(**one.memory_physics.model_dump()),
            memory_sd=one.memory_sd,
            intervals=Intervals(
                coverage=one.intervals.coverage,
                multiplier=one.intervals.multiplier,
                residual_sd=one.intervals.residual_sd,
                covariance=np.array(one.intervals.covariance),
                parameter_names=tuple(one.intervals.parameter_names),
            ),
        )
        for one in read_entry(CalibrationsEntry, read_document(path), path).calibrations
    ]


def _efficiency(one: CalibrationEntry) -> HardwareEfficiency:
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in one.physics}
    return HardwareEfficiency(**values)


def calibrated(cluster: Cluster, path: str, profile: Profile | None = None) -> Calibration:
    """Return the calibration of a cluster, from a calibration file, or from trials.

    Args:
        cluster: cluster whose devices must be those of the trials.
        path: the file; it ends in `.jsonl` if it holds trials.
        profile: measured profile that trials are fitted on; None = there is none.

    Raises:
        ConfigError: if the file cannot be read, or has nothing about these devices.
    """
    device = "+".join(sorted({node.device.name for node in cluster.nodes}))
    alike: list[Trial] = []
    if path.endswith(".jsonl"):
        trials = read_trials(path)
        known = sorted({one.device for one in trials})
        # All trials on such devices count: whoever names a file says that it is of this cluster.
        alike = [one for one in trials if one.device == device]
        found = Calibrations(alike, profile=profile).of("", device, on_several_nodes(cluster))
    else:
        entries = read_calibrations(path)
        known = sorted({one.device for one in entries})
        found = Calibrations(ready=entries).of("", device, on_several_nodes(cluster))
    if not found.num_trials and not found.num_memory_trials:
        if path.endswith(".jsonl") and alike:
            raise ConfigError(
                f"{path}: none of its {len(alike)} trials on {device} has a time or a peak: give some that ran"
            )
        several = ", or of several sources" if device in known else ""
        raise ConfigError(
            f"{path} holds no calibration of {device}{several}; it is of {', '.join(known)}: give trials that ran on "
            "these devices, of one source"
        )
    return found


def _to_json(one: Calibration) -> dict[str, Any]:
    assert one.efficiency is not None
    return {
        "source": one.source,
        "device": one.device,
        "several_nodes": one.several_nodes,
        "num_trials": one.num_trials,
        "num_memory_trials": one.num_memory_trials,
        "physics": asdict(one.efficiency),
        "memory_physics": None if one.memory_overheads is None else asdict(one.memory_overheads),
        "memory_sd": one.memory_sd,
        "intervals": {
            "coverage": one.intervals.coverage,
            "multiplier": one.intervals.multiplier,
            "residual_sd": one.intervals.residual_sd,
            "parameter_names": list(one.intervals.parameter_names),
            "covariance": one.intervals.covariance.tolist(),
        },
    }
