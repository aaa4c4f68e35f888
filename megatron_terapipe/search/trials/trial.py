"""One measured training run, and the line of a trials file that holds it."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from megatron_terapipe.search.inputs.cluster import Cluster
from megatron_terapipe.search.inputs.workload import Workload
from megatron_terapipe.search.software.description import Software
from megatron_terapipe.strategy import Strategy

Model = TypeVar("Model")

GIBIBYTE = float(2**30)
"""Bytes of a "GB" in trials: tools that print memory (nvidia-smi, PyTorch) count in powers of two."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A strategy that somebody ran, and what came of it.

    Trials of one workload or cluster share the object, so that what is computed of it is computed once.
    """

    source: str
    """Who measured it; a cluster is calibrated for each source apart. Empty = the file does not say."""
    id: str
    """Name within the source; empty = none."""
    group: str
    """Trials of one model, devices, batch and day; only those are ranked against each other."""
    workload: Workload
    cluster: Cluster
    """The nodes it ran on."""
    strategy: Strategy
    software: Software
    precision: str
    """`fp16`, `bf16` or `fp32`."""
    iteration_time_s: float | None
    """Seconds of one iteration; None = it failed, or was cut off."""
    peak_memory_bytes: float | None
    """Of the fullest device; None = not measured."""
    out_of_memory: bool | None
    """Whether memory ran out; None = not said, and it did not if there is a time."""
    activation_limit: float | None = None
    """Activations that the schedule may hold on a rank, as a multiple of 1F1B's peak; None = the schedule's own."""
    longer_than_s: float | None = None
    """Where it was cut off, seconds that it took at least."""
    rounds: int = 1
    """Number of times that it is to be run; the time is the median of those that were."""
    round_times_s: tuple[float | None, ...] = ()
    """Seconds of an iteration of each run so far, None of one that failed; empty = it is run once."""
    path: str = ""
    """File that it was read from."""
    line: int = 0
    """Its line, from 1."""
    ignored: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the file that mean nothing here, by `part.field`."""

    @property
    def name(self) -> str:
        """For people: its id, or where it stands."""
        return self.id or f"{self.path}:{self.line}"

    @property
    def device(self) -> str:
        """Kinds of devices of its cluster."""
        return "+".join(sorted({node.device.name for node in self.cluster.nodes}))

    @property
    def least_time_s(self) -> float:
        """Seconds of an iteration, measured or cut off; 0 if the trial says nothing of time."""
        return self.iteration_time_s or self.longer_than_s or 0.0


def models_of(trials: Sequence[Trial], make: Callable[[Trial], Model]) -> list[Model]:
    """Return a model for each trial; trials of one workload, cluster, software and precision share theirs."""
    made: dict[tuple[object, ...], Model] = {}
    found = []
    for one in trials:
        key = id(one.workload), id(one.cluster), one.software, one.precision
        if key not in made:
            made[key] = make(one)
        found.append(made[key])
    return found


def trial_line(
    *,
    source: str,
    group: str,
    model: Mapping[str, Any],
    cluster: Mapping[str, Any],
    strategy: Strategy,
    software: str,
    precision: str,
    iteration_time_s: float | None,
    peak_memory_bytes: float | None = None,
    out_of_memory: bool | None = None,
    trial_id: str = "",
    more: Mapping[str, Any] | None = None,
) -> str:
    """One line, without its end.

    Args:
        model: fields of the trainer's model section.
        precision: `fp16`, `bf16` or `fp32`.
        iteration_time_s: seconds of one iteration; None = it failed.
        peak_memory_bytes: of the fullest device; None = not measured.
        out_of_memory: whether memory ran out; None = not known.
    """
    measured: dict[str, Any] = {"iteration_time_s": iteration_time_s, **(more or {})}
    if peak_memory_bytes is not None:
        measured["peak_memory_bytes"] = peak_memory_bytes
        measured["peak_memory_gb"] = round(peak_memory_bytes / GIBIBYTE, 3)
    if out_of_memory is not None:
        measured["out_of_memory"] = out_of_memory
    document = {
        "source": source,
        **({"id": trial_id} if trial_id else {}),
        "group": group,
        "software": software,
        "precision": precision,
        "model": dict(model),
        "cluster": dict(cluster),
        "strategy": strategy.to_json(),
        "measured": measured,
    }
    return json.dumps(document, allow_nan=False)
