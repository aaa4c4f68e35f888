"""One measured training run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_terapipe.search.cluster import Cluster
from megatron_terapipe.search.software import Software
from megatron_terapipe.search.workload import Workload
from megatron_terapipe.strategy import Strategy

GIBIBYTE = float(2**30)
"""Bytes of a "GB" in trials: tools that print memory (nvidia-smi, PyTorch) count in powers of two."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A strategy that somebody ran, and what came of it.

    Trials of one workload or cluster share the object, so that what is computed of it is computed once.

    Attributes:
        source: who measured it; a cluster is calibrated for each source apart. Empty = the file does not say.
        id: name within the source; empty = none.
        group: trials of one model, devices, batch and day; only those are ranked against each other.
        workload: the model.
        cluster: the nodes it ran on.
        strategy: how it was trained.
        software: what trained it.
        precision: `fp16`, `bf16` or `fp32`.
        activation_limit: activations that the schedule may hold on a rank, as a multiple of 1F1B's peak; None = the
            schedule's own.
        iteration_time_s: seconds of one iteration; None = it failed, or was cut off.
        longer_than_s: where it was cut off, seconds that it took at least.
        peak_memory_bytes: of the fullest device; None = not measured.
        out_of_memory: whether memory ran out; None = not said, and it did not if there is a time.
        path: file that it was read from.
        line: its line, from 1.
        ignored: fields of the file that mean nothing here, by `part.field`.
    """

    source: str
    id: str
    group: str
    workload: Workload
    cluster: Cluster
    strategy: Strategy
    software: Software
    precision: str
    iteration_time_s: float | None
    peak_memory_bytes: float | None
    out_of_memory: bool | None
    activation_limit: float | None = None
    longer_than_s: float | None = None
    path: str = ""
    line: int = 0
    ignored: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For people: its id, or where it stands."""
        return self.id or f"{self.path}:{self.line}"

    @property
    def device(self) -> str:
        """Kinds of devices of its cluster."""
        return "+".join(sorted({node.device.name for node in self.cluster.nodes}))
