"""The answer of a search as a JSON document, which table and page read, and comparisons of its strategies."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron_terapipe.dimensions import ordered_for
from megatron_terapipe.search.answer.figures import NOT_ASKED, TOLERANCE, Training, best_published, devices_of, speed_of
from megatron_terapipe.search.answer.json_documents import ClusterPart, Document, ModelPart, RankedEntry
from megatron_terapipe.search.machine.cluster import cluster_document, model_document
from megatron_terapipe.search.price.cost_model import Prediction
from megatron_terapipe.search.price.links import ClusterTable, RankGroups
from megatron_terapipe.search.price.price_document import PredictedPart
from megatron_terapipe.search.rank.search import Ranked
from megatron_terapipe.search.rank.space import SearchProblem
from megatron_terapipe.strategy import DIMENSIONS, Strategy
from megatron_terapipe.texts import bytes_text, layout_text, numbers_text, time_text


def entries_of(problem: SearchProblem, entries: Iterable[Ranked], training: Training = NOT_ASKED) -> list[RankedEntry]:
    """Return strategies with their prices as a document has them."""
    return [
        RankedEntry(
            rank=each.rank,
            index=each.index,
            variants=each.variants,
            strategy=each.strategy,
            predicted=None if each.prediction is None else predicted_part(problem, each.strategy, each.prediction),
            decision=training.decision(problem, each),
            feasible=each.feasible,
            reason=each.reason,
        )
        for each in entries
    ]


def ranking(
    problem: SearchProblem,
    entries: Iterable[Ranked],
    notes: Iterable[str],
    *,
    global_batch_size: int | None,
    constraints: Mapping[str, Sequence[Any]] | None = None,
    training: Training = NOT_ASKED,
) -> dict[str, Any]:
    """Return the fields that the documents of `rank` and `predict` share."""
    ranked = list(entries)
    found = entries_of(problem, ranked, training)
    winner = next((each for each in zip(ranked, found, strict=True) if each[1].rank == 1 and each[1].feasible), None)
    of_winner = [] if winner is None else [f"rank 1: {note}" for note in winner[0].price.notes]
    if winner is not None and winner[1].price.mfu is not None and (best := best_published(problem.cluster)) is not None:
        of_winner.append(f"the best published MFU on such devices is {best.share:.0%}: {best.run}")
    return {
        **question(problem, global_batch_size, constraints),
        "answer": "no strategy can run" if winner is None else answer_text(problem, *winner),
        "notes": list(dict.fromkeys([*notes, *of_winner])),
        "entries": found,
    }


def answer_text(problem: SearchProblem, winner: Ranked, entry: RankedEntry) -> str:
    """Return the answer in words: sizes, time, tokens a second, MFU beside the best published, and memory."""
    price, published = entry.price, best_published(problem.cluster)
    words = [f"{time_text(price.iteration_time_s)} a step", f"{price.tokens_per_s:,.0f} tokens/s"]
    if price.mfu is not None and price.mfu_causal is not None:
        name, used, best = "MFU", price.mfu, None if published is None else published.share
        if published is not None and used > published.share + TOLERANCE:
            # Else it would seem too high because it counts scores that are never computed.
            name, used, best = "causal MFU", price.mfu_causal, published.causal_share
        kind = "" if problem.workload.experts is None else ", dense models"
        words.append(f"{name} {used:.0%}{'' if best is None else f' (best published{kind}: {best:.0%})'}")
    if price.memory_per_rank:
        groups = RankGroups(ClusterTable.of(problem.cluster), winner.strategy.layout, winner.strategy.placement)
        ranks = zip(price.memory_per_rank, groups.smallest, strict=True)
        held, of = max(((rank["total"], device.memory_bytes) for rank, device in ranks), key=lambda each: each[0])
        words.append(
            f"{bytes_text(held)} of {bytes_text(of)}" if held < 10e9 else f"{held / 1e9:.0f} of {of / 1e9:.0f} GB"
        )
    impossible = "" if (price.mfu_causal or 0.0) <= 1 else IMPOSSIBLE
    return f"{layout_text(winner.strategy)}: {', '.join(words)}{impossible}"


IMPOSSIBLE = (
    "; no device does more than its peak: correct the FLOP/s of the device, the profile, the calibration or the "
    "measured seconds, whichever is wrong"
)


TIME_NAMES = {
    "compute_s": "compute",
    "tensor_parallel_s": "tensor-parallel collectives",
    "head_exchange_s": "head exchanges",
    "expert_exchange_s": "exchanges of expert-parallel ranks",
    "host_copy_s": "copies from hosts that come late",
    "bubble_s": "bubbles",
    "transfer_s": "transfers between stages",
    "gradient_reduction_s": "gradient reduction",
    "shared_weight_s": "tied embedding",
    "optimizer_s": "optimizer",
    "fixed_s": "fixed",
}
"""Parts of an iteration in words."""


def runners_up(priced: Sequence[RankedEntry]) -> list[RankedEntry]:
    """Return the second best; and, if it is much like the best, the first with other parallel sizes or schedule."""
    if len(priced) < 2:
        return []
    winner, runner_up = priced[:2]
    other = next((entry for entry in priced[1:] if _layout(entry) != _layout(winner)), None)
    return [runner_up] if other is None or other is runner_up else [runner_up, other]


def _layout(entry: RankedEntry) -> list[object]:
    """Return the parallel sizes and the schedule."""
    return [getattr(entry.strategy, each.name) for each in DIMENSIONS if each.ranks or each.name == "schedule"]


def why_before(priced: Sequence[RankedEntry]) -> list[str]:
    """Return why the first is before a faster one, else why another row is; empty if times rise."""
    times = [entry.price.iteration_time_s for entry in priced]
    if times == sorted(times):
        return []
    best = min(priced, key=lambda entry: entry.price.iteration_time_s)
    first, other = priced[0].price, best.price
    if best is priced[0]:
        return ["of rows within 1% of time, the one with less memory comes first"]
    faster = 1 - other.iteration_time_s / first.iteration_time_s
    if first.peak_memory_bytes < other.peak_memory_bytes:
        fewer = f"holds {bytes_text(other.peak_memory_bytes - first.peak_memory_bytes)} less"
    else:
        fewer = "sends less between nodes"
    return [f"rank {best.rank} is {faster:.1%} faster; within 1% of time rank 1 comes first because it {fewer}"]


Changes = list[tuple[str, str, str]]
"""The dimensions in which two strategies differ: name, the value of the first, the value of the other."""


def compare(first: RankedEntry, other: RankedEntry) -> tuple[Changes, list[str]]:
    """Return the settings in which the second strategy differs, and sentences on the savings of the first."""
    changes = [
        (words, value_text(values[0], each.none), value_text(values[1], each.none))
        for each, words in ordered_for(DIMENSIONS, "label")
        for values in [[getattr(entry.strategy, each.name) for entry in (first, other)]]
        if values[0] != values[1]
    ]
    saved_s = other.price.iteration_time_s - first.price.iteration_time_s
    share = saved_s / other.price.iteration_time_s
    lines = [f"An iteration takes {time_text(abs(saved_s))} {'less' if saved_s >= 0 else 'more'} ({abs(share):.1%})."]
    parts = [
        (other.price.breakdown.get(name, 0.0) - first.price.breakdown.get(name, 0.0), words)
        for name, words in TIME_NAMES.items()
    ]
    for words, (seconds, name) in (("It saves most in", max(parts)), ("It pays most in", min(parts))):
        if (seconds > 0) == ("saves" in words) and abs(seconds) > MENTIONED * first.price.iteration_time_s:
            lines.append(f"{words} {name} ({time_text(abs(seconds))}).")
    if first.price.memory_per_rank and other.price.memory_per_rank:
        difference = other.price.peak_memory_bytes - first.price.peak_memory_bytes
        lines.append(f"The fullest rank holds {bytes_text(abs(difference))} {'less' if difference >= 0 else 'more'}.")
    return changes, lines


MENTIONED = 0.005  # least difference of a part of the iteration, as a share of it, that is mentioned


def value_text(value: object, none: str = "") -> str:
    """Return the value of a dimension in words; `none`: that for None."""
    if value is None:
        return none
    if isinstance(value, Sequence) and not isinstance(value, str):
        return numbers_text(value)
    return str(value) if not isinstance(value, bool) else "on" if value else "off"


def question(
    problem: SearchProblem, global_batch_size: int | None, constraints: Mapping[str, Sequence[Any]] | None = None
) -> dict[str, Any]:
    """Return the fields of every document with the question."""
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


def predicted_part(problem: SearchProblem, strategy: Strategy, prediction: Prediction) -> PredictedPart:
    """Return a prediction as a document has it."""
    speed = speed_of(problem, strategy, prediction.iteration_time_s)
    return PredictedPart(**{**prediction.to_json(), **speed.model_dump()})


def document_text(document: Document) -> str:
    """Return the text of a document: a key a line, and an entry a line where it lists some.

    Lists of stages and devices are too long for a line each.
    """

    def text(value: object) -> str:
        if isinstance(value, list) and value and isinstance(value[0], dict | str):
            return "[\n  " + ",\n  ".join(json.dumps(each) for each in value) + "\n]"
        return json.dumps(value)

    values = document.model_dump(mode="json")
    first = {"schema_version": values["schema_version"], "command": values["command"]}
    lines = [f"{json.dumps(name)}: {text(value)}" for name, value in {**first, **values}.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"
