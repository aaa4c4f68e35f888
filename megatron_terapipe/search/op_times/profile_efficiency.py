"""Links, optimizer and engine of a profile, as fields of `HardwareEfficiency`."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import NamedTuple

import numpy as np

from megatron_terapipe.search.inputs.cluster import Cluster, Link
from megatron_terapipe.search.op_times.hardware_efficiency import HardwareEfficiency
from megatron_terapipe.search.op_times.profile import Profile
from megatron_terapipe.search.software.description import Software
from megatron_terapipe.search.software.terapipe import TERAPIPE

LEAST_S = 1e-7
"""No message starts in less."""


class Line(NamedTuple):
    """Seconds of a message: `start_s + num_bytes * byte_s`."""

    start_s: float
    byte_s: float


def measured_efficiency(
    profile: Profile, cluster: Cluster, efficiency: HardwareEfficiency | None = None, software: Software = TERAPIPE
) -> HardwareEfficiency:
    """Return efficiency in which what a profile has measured is as measured; the rest stays.

    What a link reaches is said relative to what the cluster says of it, so the cluster's own figures may be guesses.

    Args:
        profile: of one machine of the cluster.
        cluster: whose first node that machine is.
        efficiency: the rest.
        software: the trainer, which says what the optimizer keeps of a parameter.
    """
    efficiency = efficiency or HardwareEfficiency()
    node = cluster.nodes[0]
    values: dict[str, float] = {}
    for link in profile.links:
        data_sheet = node.inside if link.where == "inside" else node.network
        line = message_line(link.points)
        if link.what == "all_reduce":
            name = "inside_efficiency" if link.where == "inside" else "network_efficiency"
            rounds = 2 * (link.num_ranks - 1) / link.num_ranks
            values[name] = rounds / (line.byte_s * data_sheet.bandwidth)
            if link.where == "inside" or "collective_s" not in values:
                values["collective_s"] = _beyond_latency(line, data_sheet, 2 * (link.num_ranks - 1))
        else:
            values[f"transfer_{link.where}_efficiency"] = 1 / (line.byte_s * data_sheet.bandwidth)
            values["transfer_s"] = _beyond_latency(line, data_sheet, 1)
    if profile.engine is not None:
        kept = software.step_bytes
        reached = node.device.memory_bandwidth * efficiency.memory_efficiency
        values["optimizer_passes"] = max(profile.engine.optimizer_s_per_parameter * reached / kept, LEAST_S)
        values["iteration_s"] = max(profile.engine.iteration_s, LEAST_S)
        values["op_s"] = profile.engine.op_s
    known = {each.name for each in fields(HardwareEfficiency)}
    return replace(efficiency, **{name: value for name, value in values.items() if name in known})


def message_line(points: Sequence[tuple[int, float]]) -> Line:
    """Fit start and time per byte to messages, relative errors small, neither below zero."""
    from scipy.optimize import nnls

    sizes, seconds = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    features = np.stack([np.ones_like(sizes), sizes], axis=1) / seconds[:, None]
    scale = np.maximum(features.max(axis=0), 1e-30)
    (start, byte), _ = nnls(features / scale, np.ones(len(sizes)))
    return Line(max(float(start / scale[0]), LEAST_S), max(float(byte / scale[1]), 1e-15))


def _beyond_latency(line: Line, link: Link, steps: int) -> float:
    return max(line.start_s - steps * link.latency_s, LEAST_S)
