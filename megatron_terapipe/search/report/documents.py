"""The JSON documents of the search, made of its answers; `schema.py` declares their fields."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_terapipe.search.cost.prediction import Prediction
from megatron_terapipe.search.inputs.cluster import Cluster
from megatron_terapipe.search.inputs.described import cluster_document, model_document
from megatron_terapipe.search.inputs.workload import Workload
from megatron_terapipe.search.rank.ranked import Ranked
from megatron_terapipe.search.report.advice_document import advice_part
from megatron_terapipe.search.report.answer import Answer, all_notes
from megatron_terapipe.search.report.figures import devices_of
from megatron_terapipe.search.report.schema.schema import (
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
        precision: `bf16`, `fp16` or `fp32`.
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
