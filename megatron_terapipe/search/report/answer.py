"""The answer of a search, as all reports read it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_terapipe.search.inputs.cluster import Cluster
from megatron_terapipe.search.inputs.workload import Workload
from megatron_terapipe.search.rank.ranked import Ranked
from megatron_terapipe.search.report.advice import Advice
from megatron_terapipe.search.report.figures import speed_of
from megatron_terapipe.search.report.schema.schema import Speed
from megatron_terapipe.search.software.terapipe import TERAPIPE
from megatron_terapipe.search.space.legal_grids import SearchCounts


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A ranking, and what it is about."""

    workload: Workload
    """The model."""
    cluster: Cluster
    """Where."""
    precision: str
    """`bf16`, `fp16` or `fp32`."""
    entries: Sequence[Ranked]
    """Best first, then those that cannot run."""
    software: str = TERAPIPE.name
    """Name of the trainer."""
    global_batch_size: int | None = None
    """Sequences of one optimizer step; None = each strategy has its own."""
    constraints: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values that flags allow for dimensions."""
    counts: SearchCounts | None = None
    """Strategies that were looked at; None = nobody searched."""
    proven: bool = False
    """Whether no other strategy can be faster than the winner, under this model."""
    could_save: float = 0.0
    """Share of the winner's time that a strategy that was not simulated could save at most."""
    search_s: float | None = None
    """Seconds that the search took; None = nobody timed it."""
    advice: Advice = field(default_factory=Advice)
    """What to change and what to doubt; the notes have it in words."""
    notes: tuple[str, ...] = ()
    """Assumptions and warnings, a line each."""
    why_none: str = ""
    """Why no strategy can run; empty where one can."""

    @property
    def priced(self) -> list[Ranked]:
        """Entries that can run and have a price, best first."""
        return [entry for entry in self.entries if entry.feasible and entry.prediction is not None]

    def speed(self, entry: Ranked) -> Speed:
        """Return what the predicted time of an entry means."""
        assert entry.prediction is not None
        time_s = entry.prediction.iteration_time_s
        return speed_of(entry.strategy, self.workload, self.cluster, time_s, self.precision)


def all_notes(answer: Answer) -> list[str]:
    """Return assumptions, and warnings about the winner, each once."""
    winner = next(iter(answer.priced), None)
    of_winner = () if winner is None or winner.prediction is None else winner.prediction.notes
    return list(dict.fromkeys([*_impossible(answer), *answer.notes, *(f"rank 1: {note}" for note in of_winner)]))


def _impossible(answer: Answer) -> list[str]:
    """Return a warning if an entry takes more FLOP/s than there are, which no trial can confirm."""
    shares = [(answer.speed(entry).mfu_causal or 0.0, entry) for entry in answer.entries if entry.prediction]
    share, entry = max(shares, key=lambda each: each[0], default=(0.0, None))
    if entry is None or share <= 1:
        return []
    return [
        f"rank {entry.rank} would take {share:.0%} of the devices' peak, and no device does more than its peak: "
        "correct the FLOP/s of the device, the profile, the calibration or the measured seconds, whichever is wrong"
    ]
