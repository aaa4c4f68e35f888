"""Megatron's flags for the layers of stages."""

from typing import Any

import pytest

from megatron_terapipe.arguments.spellings import layout_stages, resolve_spellings

EACH, LAYOUT = "num_layers_per_virtual_pipeline_stage", "pipeline_model_parallel_layout"
FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
EMBEDDING, OUTPUT = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
BOTH = {EMBEDDING: True, OUTPUT: True}


def ours(num_layers: int, num_ranks: int, **given: Any) -> tuple[str | None, int | None]:
    found = resolve_spellings({"num_layers": num_layers, "pipeline_model_parallel_size": num_ranks, **given})
    assert not found.keys() & {EACH, LAYOUT, FIRST, LAST, EMBEDDING, OUTPUT}
    return found.get("stage_partition"), found.get("num_model_chunks")


@pytest.mark.parametrize(
    ("num_layers", "num_ranks", "given", "partition", "chunks"),
    [
        (10, 4, {}, None, None),
        # The ends have as many as is said; the others share the rest evenly.
        (10, 4, {LAST: 1}, "0,3,6,9,10", None),
        (10, 4, {FIRST: 1}, "0,1,4,7,10", None),
        (10, 4, {FIRST: 2, LAST: 1}, "0,2,6,9,10", None),
        (10, 3, {FIRST: 4, LAST: 5}, "0,4,5,10", None),
        (8, 2, {FIRST: 2, "num_model_chunks": 2}, "0,1,4,5,8", 2),
        # Embedding and output layer count as layers.
        (10, 4, BOTH, "0,2,5,8,10", None),
        (11, 4, {EMBEDDING: True}, "0,2,5,8,11", None),
        (11, 4, {OUTPUT: True}, "0,3,6,9,11", None),
        (6, 2, BOTH | {"num_model_chunks": 2}, "0,1,3,5,6", 2),
        (6, 2, BOTH | {EACH: 2}, "0,1,3,5,6", 2),
        (6, 4, BOTH | {"num_model_chunks": 2}, "0,0,1,2,3,4,5,6,6", 2),
        # Each stage has as many.
        (8, 2, {EACH: 2}, None, 2),
        (7, 2, {LAYOUT: "Et*3|t|tt|tL"}, "0,3,4,6,7", 2),
    ],
)
def test_stages(num_layers: int, num_ranks: int, given: dict[str, Any], partition: str, chunks: int) -> None:
    assert ours(num_layers, num_ranks, **given) == (partition, chunks)


@pytest.mark.parametrize(
    ("text", "num_ranks", "bounds", "model_chunks"),
    [
        ("EtL", 1, (0, 1), 1),
        ("Ett|tttL", 2, (0, 2, 5), 1),
        ("Et*3|(tt|)*6t*2L", 4, (0, 3, 5, 7, 9, 11, 13, 15, 17), 2),
        ("E,t,|,(t,t|)*2, tL", 2, (0, 1, 3, 5, 6), 2),
        ("E(t)*2|tL", 2, (0, 2, 3), 1),
        ("E((t|)*2)*2tL", 5, (0, 1, 2, 3, 4, 5), 1),
        # The ends alone.
        ("E|t|tL", 3, (0, 0, 1, 2), 1),
        ("Et|t|L", 3, (0, 1, 2, 2), 1),
        ("E|(tt|)*2L", 4, (0, 0, 2, 4, 4), 1),
    ],
)
def test_layouts(text: str, num_ranks: int, bounds: tuple[int, ...], model_chunks: int) -> None:
    partition, found = layout_stages(text, num_ranks)
    assert (partition.bounds, found) == (bounds, model_chunks)
