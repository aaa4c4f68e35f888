"""The answer of a search, as all reports read it: beside its runner-up, and as a JSON document."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from megatron_terapipe.dimensions import Dimension, in_places
from megatron_terapipe.search.answer.figures import bytes_text, devices_of, numbers_text, speed_of, time_text
from megatron_terapipe.search.answer.json_schema import (
    AdvicePart,
    ClusterPart,
    Document,
    Entry,
    LaunchPart,
    ModelPart,
    PredictDocument,
    Predicted,
    RankDocument,
    SearchPart,
    Speed,
)
from megatron_terapipe.search.machine.cluster import Cluster, cluster_document, model_document
from megatron_terapipe.search.price.prediction import Prediction, TimeBreakdown
from megatron_terapipe.search.price.workload import Workload
from megatron_terapipe.search.rank.ranked import Ranked
from megatron_terapipe.search.rank.rules import SearchCounts
from megatron_terapipe.search.rank.space import SearchProblem
from megatron_terapipe.strategy import DIMENSIONS, Strategy


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A ranking, and what it is about."""

    problem: SearchProblem
    entries: Sequence[Ranked]
    """Best first, then those that cannot run."""
    global_batch_size: int | None = None
    """Sequences of one optimizer step; None = each strategy has its own."""
    constraints: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    counts: SearchCounts | None = None
    """Strategies that were looked at; None = nothing was searched."""
    proven: bool = False
    """Whether no other strategy can be faster than the winner, under this model."""
    could_save: float = 0.0
    """Share of the winner's time that a strategy that was not simulated could save at most."""
    search_s: float | None = None
    """Seconds that the search took; None = they were not measured."""
    advice: AdvicePart = field(default_factory=AdvicePart.of)
    notes: tuple[str, ...] = ()
    """Assumptions, advice and warnings, a line each."""
    why_none: str = ""
    """Why no strategy can run; empty where one can."""

    @property
    def workload(self) -> Workload:
        """The model."""
        return self.problem.workload

    @property
    def cluster(self) -> Cluster:
        """The cluster, in the order of its hostfile."""
        return self.problem.cluster

    @property
    def priced(self) -> list[Ranked]:
        """Entries that can run and have a price, best first."""
        return [entry for entry in self.entries if entry.feasible and entry.prediction is not None]

    def speed(self, entry: Ranked) -> Speed:
        """Return the published figures that follow from the predicted time of an entry."""
        return speed_of(entry.strategy, self.workload, self.cluster, entry.iteration_time_s, self.problem.precision)


def all_notes(answer: Answer) -> list[str]:
    """Return assumptions, and warnings about the winner, each once."""
    of_winner = [f"rank 1: {note}" for entry in answer.priced[:1] for note in entry.price.notes]
    return list(dict.fromkeys([*_impossible(answer), *answer.notes, *of_winner]))


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


TIME_NAMES = {
    "compute_s": "compute",
    "tensor_parallel_s": "tensor-parallel collectives",
    "head_exchange_s": "head exchanges",
    "host_copy_s": "copies from hosts that come late",
    "bubble_s": "bubbles",
    "transfer_s": "transfers between stages",
    "gradient_reduction_s": "gradient reduction",
    "shared_weight_s": "tied embedding",
    "optimizer_s": "optimizer",
    "fixed_s": "fixed",
}
"""Parts of an iteration in words."""

_WORTH_SAYING = 0.005  # parts that differ by less than this share of the iteration are noise to a reader
_LEAST_SHARE = 0.001  # shares below this would be written as none


class StrategyComparison(NamedTuple):
    """The differences between the winner and another strategy."""

    changes: list[tuple[str, str, str]]
    """The dimensions in which the other differs: name, the winner's value, the other's."""
    sentences: list[str]
    """Seconds and bytes that differ, in words."""


def runners_up(priced: Sequence[Ranked]) -> list[Ranked]:
    """Return the second best; and, if it is much like the best, the first with other parallel sizes or schedule."""
    if len(priced) < 2:
        return []
    winner, runner_up = priced[:2]
    other = next((entry for entry in priced[1:] if _layout(entry) != _layout(winner)), None)
    return [runner_up] if other is None or other is runner_up else [runner_up, other]


def _layout(entry: Ranked) -> list[object]:
    """Return the parallel sizes and the schedule."""
    strategy = entry.strategy
    return [*(getattr(strategy, each.name) for each in DIMENSIONS if each.ranks), strategy.schedule]


def compare(winner: Ranked, other: Ranked) -> StrategyComparison:
    """Compare the winner with another strategy."""
    changes = [
        (words, dimension_text(winner.strategy, each), dimension_text(other.strategy, each))
        for each, words in in_places(DIMENSIONS, "label")
        if getattr(winner.strategy, each.name) != getattr(other.strategy, each.name)
    ]
    first, second = winner.price.breakdown, other.price.breakdown
    saved = [(each.name, getattr(second, each.name) - getattr(first, each.name)) for each in fields(TimeBreakdown)]
    worth = _WORTH_SAYING * winner.iteration_time_s
    saved = sorted((part for part in saved if abs(part[1]) >= worth), key=lambda part: -abs(part[1]))
    return StrategyComparison(changes, _sentences(winner.price, other.price, saved))


def _sentences(first: Prediction, second: Prediction, saved: Sequence[tuple[str, float]]) -> list[str]:
    gain = second.iteration_time_s - first.iteration_time_s
    share = gain / second.iteration_time_s if second.iteration_time_s else 0.0
    if gain <= 0:
        lines = ["Both are predicted to take the same time."]
    else:
        part = f"{share:.1%}" if share >= _LEAST_SHARE else f"below {_LEAST_SHARE:.1%}"
        lines = [f"An iteration takes {time_text(gain)} less ({part})."]
    for sign, words in ((1, "It saves in"), (-1, "It pays with more in")):
        parts = [f"{TIME_NAMES[name]} ({time_text(sign * seconds)})" for name, seconds in saved if sign * seconds > 0]
        if parts:
            *others, last = parts
            lines.append(f"{words} {', '.join(others)} and {last}." if others else f"{words} {last}.")
    if first.memory and second.memory:
        difference = second.peak_memory_bytes - first.peak_memory_bytes
        word = "less" if difference >= 0 else "more"
        lines.append(f"The fullest rank holds {bytes_text(abs(difference))} {word}.")
    if first.interval_s and second.interval_s and first.interval_s[1] >= second.interval_s[0]:
        lines.append("Their intervals overlap: only a trial of both can tell which is faster.")
    return lines


def dimension_text(strategy: Strategy, dimension: Dimension) -> str:
    """Return the value of a dimension in words."""
    value = getattr(strategy, dimension.name)
    if value is None:
        return dimension.none
    if isinstance(value, tuple):
        return numbers_text(value)
    return str(value) if not isinstance(value, bool) else "on" if value else "off"


def question(
    problem: SearchProblem, global_batch_size: int | None, constraints: Mapping[str, Sequence[Any]] | None = None
) -> dict[str, Any]:
    """Return the fields of every document that say what was asked."""
    workload, cluster = problem.workload, problem.cluster
    return {
        "model": ModelPart(
            name=workload.name,
            parameters=workload.parameters,
            num_layers=workload.num_dealt_layers,
            seq_length=workload.seq_length,
            settings=None if workload.config is None else model_document(workload.config),
        ),
        "cluster": ClusterPart(
            name=cluster.name,
            num_nodes=len(cluster.nodes),
            num_devices=cluster.num_devices,
            devices=devices_of(cluster),
            nodes=cluster_document(cluster.nodes)["nodes"],
        ),
        "precision": problem.precision,
        "software": problem.software.name,
        "global_batch_size": global_batch_size,
        "constraints": {name: list(values) for name, values in (constraints or {}).items()},
    }


def predicted_part(prediction: Prediction, speed: Speed) -> Predicted:
    """Return a prediction as a document has it."""
    return Predicted(**{**prediction.to_json(), **speed.model_dump()})


def _of_answer(answer: Answer, entries: Sequence[Ranked]) -> dict[str, Any]:
    """Return the fields that the documents of `rank` and `predict` share."""
    return {
        **question(answer.problem, answer.global_batch_size, answer.constraints),
        "notes": all_notes(answer),
        "entries": [
            Entry(
                rank=entry.rank,
                index=entry.index,
                strategy=entry.strategy.to_json(),
                predicted=None if entry.prediction is None else predicted_part(entry.prediction, answer.speed(entry)),
                feasible=entry.feasible,
                reason=entry.reason,
            )
            for entry in entries
        ],
    }


def rank_document(answer: Answer, launch: LaunchPart) -> RankDocument:
    """Return the document of `rank`."""
    counts = answer.counts
    assert counts is not None
    return RankDocument(
        **_of_answer(answer, answer.entries),
        advice=answer.advice,
        search=SearchPart(
            considered=counts.total,
            rejected={name: number for name, number in counts.rejected.items() if number},
            priced=counts.priced,
            simulated=counts.simulated,
            proven=answer.proven,
            could_save=answer.could_save,
        ),
        why_none=answer.why_none or None,
        launch=launch,
    )


def predict_document(answer: Answer) -> PredictDocument:
    """Return the document of `predict`, entries in the order of their file."""
    return PredictDocument(**_of_answer(answer, sorted(answer.entries, key=lambda entry: entry.index)))


def document_text(document: Document) -> str:
    """Return the text of a document: a key a line, and an entry a line where it lists some.

    Lists of stages and devices are long, and nobody reads them downwards.
    """

    def text(value: object) -> str:
        if isinstance(value, list) and value and isinstance(value[0], dict | str):
            return "[\n  " + ",\n  ".join(json.dumps(each) for each in value) + "\n]"
        return json.dumps(value)

    values = document.model_dump(mode="json")
    first = {"schema_version": values["schema_version"], "command": values["command"]}
    lines = [f"{json.dumps(name)}: {text(value)}" for name, value in {**first, **values}.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"
