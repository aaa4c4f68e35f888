"""Parameters of pipeline ranks: a tied embedding is there once on a rank, and is known to be shared by two."""

from dataclasses import replace

import pytest

from megatron_terapipe.search.inputs.workload import parameters_per_rank
from megatron_terapipe.search.rank.stage_counts import stage_counts
from tests.search.cost.machines import GPT

EMBEDDING = GPT.layers[0].shared_parameters


def held(num_stages: int, num_ranks: int, tensor: int = 1) -> tuple[list[float], list[float]]:
    return parameters_per_rank(GPT, GPT.stages(GPT.partition("uniform", num_stages)), num_ranks, tensor)


@pytest.mark.parametrize("model_chunks", [1, 2])
def test_one_rank_holds_every_parameter_once(model_chunks: int) -> None:
    assert GPT.layers[0].shared_weight is not None
    total, shared = held(model_chunks, 1)
    assert total == [GPT.parameters]
    assert shared == [0.0]


def test_both_ends_of_a_pipeline_hold_the_embedding() -> None:
    total, shared = held(8, 4)
    assert sum(total) == GPT.parameters + EMBEDDING
    assert shared == [EMBEDDING, 0.0, 0.0, EMBEDDING]


def test_tensor_parallel_ranks_divide_it() -> None:
    total, shared = held(2, 2, tensor=4)
    assert shared == [EMBEDDING / 4] * 2
    assert sum(total) < (GPT.parameters + EMBEDDING) / 4 * 1.01


def test_an_untied_head_is_its_own() -> None:
    layers = tuple(replace(layer, shared_weight=None, shared_parameters=0) for layer in GPT.layers)
    total, shared = parameters_per_rank(replace(GPT, layers=layers), [range(len(layers))], 1, 1)
    assert total == [GPT.parameters + EMBEDDING]
    assert shared == [0.0]


def test_a_whole_space_counts_the_same() -> None:
    kinds = {id(layer): index for index, layer in enumerate(dict.fromkeys(GPT.layers))}
    partition = GPT.partition("uniform", 1)
    counts = stage_counts(GPT, partition, 1, 2, kinds)
    assert counts.parameters.tolist() == held(1, 1, tensor=2)[0]
