"""The answer of a search, as all reports read it: beside its runner-up, and as a JSON document."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from megatron_terapipe.dimensions import Dimension, in_places
from megatron_terapipe.search.answer.advice import Advice, advice_part
from megatron_terapipe.search.answer.figures import bytes_text, devices_of, numbers_text, speed_of, time_text
from megatron_terapipe.search.answer.json_schema import (
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
from megatron_terapipe.search.machine.terapipe import TERAPIPE
from megatron_terapipe.search.price.prediction import Prediction, TimeBreakdown
from megatron_terapipe.search.price.workload import Workload
from megatron_terapipe.search.rank.ranked import Ranked
from megatron_terapipe.search.rank.rules import SearchCounts
from megatron_terapipe.strategy import DIMENSIONS


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

_WORTH_SAYING = 0.005
"""Parts that differ by less than this share of the iteration are noise to a reader."""

_LEAST_SHARE = 0.001
"""Shares below this would be written as none."""


@dataclass(frozen=True, slots=True)
class StrategyComparison:
    """The differences between the winner and another strategy."""

    changes: tuple[tuple[str, str, str], ...]
    """What the other does differently: name, the winner's value, the other's."""
    saved_s: tuple[tuple[str, float], ...]
    """Seconds that the winner is shorter by, for each part of the iteration that matters, largest first."""
    sentences: tuple[str, ...]
    """The same in words."""


def rivals(priced: Sequence[Ranked]) -> list[Ranked]:
    """Return the runner-up; and, if it is much like the winner, the best with other parallel sizes or schedule."""
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
    assert winner.prediction is not None and other.prediction is not None
    first, second = winner.prediction, other.prediction
    changes = tuple(
        (words, _value(winner, each), _value(other, each))
        for each, words in in_places(DIMENSIONS, "label")
        if getattr(winner.strategy, each.name) != getattr(other.strategy, each.name)
    )
    saved = sorted(
        (
            (name, getattr(second.breakdown, name) - getattr(first.breakdown, name))
            for name in (each.name for each in fields(TimeBreakdown))
        ),
        key=lambda part: -abs(part[1]),
    )
    worth = _WORTH_SAYING * first.iteration_time_s
    said = tuple((name, seconds) for name, seconds in saved if abs(seconds) >= worth)
    return StrategyComparison(changes, said, tuple(_sentences(first, second, said)))


def _sentences(first: Prediction, second: Prediction, saved: tuple[tuple[str, float], ...]) -> list[str]:
    gain = second.iteration_time_s - first.iteration_time_s
    share = gain / second.iteration_time_s if second.iteration_time_s else 0.0
    if gain <= 0:
        lines = ["Both are predicted to take the same time."]
    else:
        part = f"{share:.1%}" if share >= _LEAST_SHARE else f"below {_LEAST_SHARE:.1%}"
        lines = [f"An iteration takes {time_text(gain)} less ({part})."]
    shorter = [f"{TIME_NAMES[name]} ({time_text(seconds)})" for name, seconds in saved if seconds > 0]
    longer = [f"{TIME_NAMES[name]} ({time_text(-seconds)})" for name, seconds in saved if seconds < 0]
    if shorter:
        lines.append(f"It saves in {_listed(shorter)}.")
    if longer:
        lines.append(f"It pays with more in {_listed(longer)}.")
    if first.memory and second.memory:
        difference = second.peak_memory_bytes - first.peak_memory_bytes
        word = "less" if difference >= 0 else "more"
        lines.append(f"The fullest rank holds {bytes_text(abs(difference))} {word}.")
    if first.interval_s and second.interval_s and first.interval_s[1] >= second.interval_s[0]:
        lines.append("Their intervals overlap: only a trial of both can tell which is faster.")
    return lines


def _value(entry: Ranked, dimension: Dimension) -> str:
    value = getattr(entry.strategy, dimension.name)
    if value is None:
        return dimension.none
    if isinstance(value, tuple):
        return numbers_text(value)
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def model_part(workload: Workload) -> ModelPart:
    """Return what a document says of the model."""
    return ModelPart(
        name=workload.name,
        parameters=workload.parameters,
        num_layers=workload.num_dealt_layers,
        seq_length=workload.seq_length,
        settings=None if workload.config is None else model_document(workload.config),
    )


def cluster_part(cluster: Cluster) -> ClusterPart:
    """Return what a document says of the cluster."""
    return ClusterPart(
        name=cluster.name,
        num_nodes=len(cluster.nodes),
        num_devices=cluster.num_devices,
        devices=devices_of(cluster),
        nodes=cluster_document(cluster.nodes)["nodes"],
    )


def question(
    workload: Workload,
    cluster: Cluster,
    *,
    precision: str,
    software: str,
    global_batch_size: int | None,
    constraints: Mapping[str, Sequence[Any]] | None = None,
) -> dict[str, Any]:
    """Return the fields of every document that say what was asked.

    Args:
        global_batch_size: sequences of one optimizer step; None = each strategy has its own.
    """
    return {
        "model": model_part(workload),
        "cluster": cluster_part(cluster),
        "precision": precision,
        "software": software,
        "global_batch_size": global_batch_size,
        "constraints": {name: list(values) for name, values in (constraints or {}).items()},
    }


def predicted_part(prediction: Prediction, speed: Speed) -> Predicted:
    """Return what a document says of a prediction."""
    return Predicted(**{**prediction.to_json(), **speed.model_dump()})


def entry_part(answer: Answer, entry: Ranked) -> Entry:
    """Return what a document says of an entry."""
    return Entry(
        rank=entry.rank,
        index=entry.index,
        strategy=entry.strategy.to_json(),
        predicted=None if entry.prediction is None else predicted_part(entry.prediction, answer.speed(entry)),
        feasible=entry.feasible,
        reason=entry.reason,
    )


def rank_document(answer: Answer, launch: LaunchPart) -> RankDocument:
    """Return the document of `rank`."""
    counts = answer.counts
    assert counts is not None
    return RankDocument(
        **_of_answer(answer),
        entries=[entry_part(answer, entry) for entry in answer.entries],
        advice=advice_part(answer.advice),
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
    """Return the document of `predict`, entries in the order in which they were asked for."""
    in_file = sorted(answer.entries, key=lambda entry: entry.index)
    return PredictDocument(**_of_answer(answer), entries=[entry_part(answer, entry) for entry in in_file])


def _of_answer(answer: Answer) -> dict[str, Any]:
    asked = question(
        answer.workload,
        answer.cluster,
        precision=answer.precision,
        software=answer.software,
        global_batch_size=answer.global_batch_size,
        constraints=answer.constraints,
    )
    return {**asked, "notes": all_notes(answer)}


def document_text(document: Document) -> str:
    """Return the text of a document: a key a line, and an entry a line where it lists some.

    Lists of stages and devices are long, and nobody reads them downwards.
    """
    values = document.model_dump(mode="json")
    first = {"schema_version": values["schema_version"], "command": values["command"]}
    lines = [f"{json.dumps(name)}: {_value_text(value)}" for name, value in {**first, **values}.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _value_text(value: object) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict | str):
        return "[\n  " + ",\n  ".join(json.dumps(each) for each in value) + "\n]"
    return json.dumps(value)
