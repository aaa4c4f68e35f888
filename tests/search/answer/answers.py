"""A small answer of a search, made by hand; and documents that commands print, read by the classes that write them."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from megatron_terapipe.search.answer.answer import ranking
from megatron_terapipe.search.answer.figures import NOT_ASKED, Training
from megatron_terapipe.search.answer.json_documents import (
    PredictDocument,
    RankDocument,
    SearchPart,
    TokenSlicesDocument,
    TrialDocument,
)
from megatron_terapipe.search.machine.cluster_files import parse_cluster
from megatron_terapipe.search.price.cost_model import Prediction, TimeBreakdown
from megatron_terapipe.search.price.memory import RankMemory
from megatron_terapipe.search.price.workload_files import parse_workload
from megatron_terapipe.search.rank.search import Ranked
from megatron_terapipe.search.rank.space import SearchProblem
from megatron_terapipe.strategy import Strategy

PARTS = ("weights", "gradients", "optimizer", "activations", "key_values", "logits", "buffers", "framework")


def prediction(compute_s: float, bubble_s: float, *, ranks: int, peak: float = 8e9) -> Prediction:
    breakdown = TimeBreakdown(
        compute_s=compute_s,
        tensor_parallel_s=0.1,
        bubble_s=bubble_s,
        transfer_s=0.02,
        gradient_reduction_s=0.05,
        shared_weight_s=0.0,
        optimizer_s=0.01,
        fixed_s=0.02,
    )
    memory = RankMemory(**dict.fromkeys(PARTS, peak / len(PARTS)))
    time_s = breakdown.total_s
    return Prediction(
        iteration_time_s=time_s,
        bubble_ratio=bubble_s / time_s,
        breakdown=breakdown,
        memory=(memory,) * ranks,
        interval_s=(0.9 * time_s, 1.2 * time_s),
        notes=("micro-batches extrapolated",),
    )


def small_problem(name: str = "tiny") -> SearchProblem:
    """Sixteen devices on two nodes."""
    model = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 128, "vocab_size": 257}
    nodes = [{"name": "a", "count": 2, "device": "A100-80GB"}]
    return SearchProblem(
        workload=parse_workload(model, "m.json"),
        cluster=parse_cluster({"name": name, "nodes": nodes}, "c.json")[0],
        global_batch_size=8,
    )


SECOND = Strategy(data_parallel_size=2, tensor_parallel_size=2, pipeline_parallel_size=4, global_batch_size=8)
BEST = replace(SECOND, num_token_slices=2, token_slices=(80, 48))


def strategies() -> list[Ranked]:
    """Two strategies that run and one that does not."""
    return [
        Ranked(rank=1, strategy=BEST, prediction=prediction(1.0, 0.2, ranks=4)),
        Ranked(rank=2, strategy=SECOND, prediction=prediction(0.9, 0.8, ranks=4)),
        Ranked(
            rank=3,
            strategy=Strategy(data_parallel_size=16, global_batch_size=16),
            prediction=None,
            reason="[why] <it> falls",
        ),
    ]


def answer(
    problem: SearchProblem | None = None,
    entries: Sequence[Ranked] | None = None,
    notes: Sequence[str] = (),
    training: Training = NOT_ASKED,
    **more: Any,
) -> RankDocument:
    """Return the document of a ranking."""
    rejected = {"does not fit <memory>": 3000, "batch": 1000}
    fields: dict[str, Any] = {
        "advice": [],
        "search": SearchPart(
            considered=5000, rejected=rejected, priced=1000, simulated=0, proven=False, could_save=0.0
        ),
        "why_none": None,
    }
    found = strategies() if entries is None else entries
    shared = ranking(problem or small_problem(), found, notes, global_batch_size=8, training=training)
    return RankDocument(**shared, **(fields | more))


READER: TypeAdapter[Any] = TypeAdapter(
    Annotated[RankDocument | PredictDocument | TokenSlicesDocument | TrialDocument, Field(discriminator="command")]
)


def checked(text: str) -> dict[str, Any]:
    """Return the document of a text; raises if a key is unknown or missing, or a value is of another type."""
    document = json.loads(text)
    READER.validate_python(document)
    assert isinstance(document, dict)
    return document


def read(path: Path) -> dict[str, Any]:
    """Return the document of a file; see `checked`."""
    return checked(path.read_text())
