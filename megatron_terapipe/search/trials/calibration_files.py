"""Calibration files: constants that trials once gave, kept for later runs of the search."""

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from deepspeed_ext.plan.text_files import write_text
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.cost.memory_overheads import MemoryOverheads
from megatron_terapipe.search.inputs.cluster import Cluster
from megatron_terapipe.search.inputs.documents import Fields, read_document
from megatron_terapipe.search.op_times.hardware_efficiency import HardwareEfficiency
from megatron_terapipe.search.op_times.profile import Profile
from megatron_terapipe.search.trials.calibration import Calibration, on_several_nodes
from megatron_terapipe.search.trials.cluster_calibrations import Calibrations
from megatron_terapipe.search.trials.intervals import Intervals
from megatron_terapipe.search.trials.read import read_trials
from megatron_terapipe.search.trials.trial import Trial

FORMAT = "terapipe calibration"
VERSION = 1


def write_calibrations(path: str, calibrations: Sequence[Calibration]) -> None:
    """Write a calibration file.

    Raises:
        UserError: if it cannot be written.
    """
    document = {"format": FORMAT, "version": VERSION, "calibrations": [_to_json(one) for one in calibrations]}
    write_text(path, json.dumps(document, indent=1) + "\n")


def read_calibrations(path: str) -> list[Calibration]:
    """Read a calibration file.

    Raises:
        ConfigError: if it is none, or a field is wrong.
    """
    document = Fields(read_document(path), path)
    if document.raw("format") != FORMAT:
        raise document.fault(
            "format", "is not that of a calibration", f'write one with --save-calibration ("{FORMAT}")'
        )
    if document.whole("version") != VERSION:
        raise document.fault("version", f"is not {VERSION}", "calibrate again with this version")
    return [_from_json(section) for section in document.sections("calibrations")]


def calibrated(cluster: Cluster, path: str, profile: Profile | None = None) -> Calibration:
    """What a file says of a cluster: a calibration file, or trials to calibrate with.

    Args:
        cluster: whose devices must be those of the trials.
        path: ends in `.jsonl` if it holds trials.
        profile: measured, that trials are to be fitted on; None = there is none.

    Raises:
        ConfigError: if the file cannot be read, or says nothing of these devices.
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


def _from_json(section: Fields) -> Calibration:
    memory = _constants(section.section("memory_physics"), MemoryOverheads) if section.has("memory_physics") else None
    return Calibration(
        source=section.text("source", ""),
        device=section.text("device"),
        several_nodes=section.flag("several_nodes") if section.has("several_nodes") else None,
        num_trials=section.whole("num_trials", least=0),
        num_memory_trials=section.whole("num_memory_trials", least=0),
        efficiency=HardwareEfficiency(**_constants(section.section("physics"), HardwareEfficiency)),
        memory_overheads=None if memory is None else MemoryOverheads(**memory),
        memory_sd=section.number("memory_sd"),
        intervals=_intervals(section.section("intervals")),
    )


def _constants(section: Fields, declaring: type) -> dict[str, float]:
    values = {each.name: section.number(each.name, above=False) for each in fields(declaring)}
    section.finish()
    return values


def _intervals(section: Fields) -> Intervals:
    names, rows = section.raw("parameter_names"), section.raw("covariance")
    known = {each.name for each in fields(HardwareEfficiency)}
    if not isinstance(names, list) or not set(names) <= known:
        raise section.fault("parameter_names", "does not list constants of the cost model", "calibrate again")
    try:
        covariance = np.array(rows, dtype=float)
    except (TypeError, ValueError):
        covariance = np.zeros(0)
    if covariance.shape != (len(names), len(names)):
        raise section.fault("covariance", f"is not a table of {len(names)} x {len(names)} numbers", "calibrate again")
    return Intervals(
        coverage=section.number("coverage"),
        multiplier=section.number("multiplier"),
        residual_sd=section.number("residual_sd"),
        covariance=covariance,
        parameter_names=tuple(names),
    )
