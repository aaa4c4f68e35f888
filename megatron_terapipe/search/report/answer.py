"""The answer of a search, as all reports read it, and its JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_terapipe.search.inputs.cluster import Cluster
from megatron_terapipe.search.inputs.workload import Workload
from megatron_terapipe.search.rank.ranked import Ranked


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A ranking, and what it is about.

    Attributes:
        workload: the model.
        cluster: where.
        precision: `bf16`, `fp16` or `fp32`.
        global_batch_size: sequences of one optimizer step; None = each strategy has its own.
        entries: best first, then those that cannot run.
        considered: strategies looked at; 0 = nobody counted.
        rejections: reason, and how many strategies fell for it.
        search_s: seconds that the search took; None = nobody timed it.
        notes: assumptions and warnings, a line each.
    """

    workload: Workload
    cluster: Cluster
    precision: str
    entries: Sequence[Ranked]
    global_batch_size: int | None = None
    considered: int = 0
    rejections: Mapping[str, int] = field(default_factory=dict)
    search_s: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def priced(self) -> list[Ranked]:
        """Entries that can run and have a price, best first."""
        return [entry for entry in self.entries if entry.feasible and entry.prediction is not None]


def entry_json(entry: Ranked) -> dict[str, Any]:
    """Return the JSON object of one entry."""
    return {
        "rank": entry.rank,
        "strategy": entry.strategy.to_json(),
        "predicted": None if entry.prediction is None else entry.prediction.to_json(),
        "feasible": entry.feasible,
        "reason": entry.reason,
    }


def answer_json(entries: Sequence[Ranked]) -> list[dict[str, Any]]:
    """Return the JSON of a ranking: a list of entries."""
    return [entry_json(entry) for entry in entries]
