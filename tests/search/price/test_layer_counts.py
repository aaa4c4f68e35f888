"""Parameters of pipeline ranks: a tied embedding is there once on a rank, and is known to be shared by two."""

from dataclasses import replace

import pytest

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.price.stages import LayerCounter
from megatron_terapipe.search.price.workload import Workload
from tests.search.price.machines import GPT

EMBEDDING = GPT.layers[0].shared_parameters


def held(num_stages: int, num_ranks: int, tensor: int = 1, workload: Workload = GPT) -> tuple[list[float], list[float]]:
    counts = LayerCounter(workload).count(workload.partition("uniform", num_stages), num_ranks, tensor)
    return counts.parameters.tolist(), counts.shared_parameters.tolist()


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


def test_layers_are_counted_by_kind() -> None:
    counter = LayerCounter(GPT)
    counts = counter.count(GPT.partition("uniform", 8), 4, 1)
    assert counts.per_stage.sum() == counts.per_rank.sum() == len(GPT.layers)
    for stage, layers in enumerate(GPT.stages(GPT.partition("uniform", 8))):
        kinds = [GPT.layers[index] for index in layers]
        expected = [sum(each is kind for each in kinds) for kind in counter.kinds]
        assert counts.per_stage[stage].tolist() == expected
        if stage < 7:
            assert counts.last_layers[stage] == layers[-1]


def test_vocabulary_stages_have_equal_parts_of_the_head() -> None:
    untied = tuple(replace(layer, shared_weight=None, shared_parameters=0) for layer in GPT.layers)
    workload = replace(GPT, layers=untied)
    counter, partition = LayerCounter(workload), workload.partition("uniform", 2)
    whole, cut = (counter.count(partition, 2, 1, vocabulary_stages=stages) for stages in (False, True))
    head = [layer.kind for layer in counter.kinds].index("head")
    assert cut.per_stage[:, head].tolist() == [0, 0, 0.5, 0.5]
    assert cut.per_stage.sum(axis=0).tolist() == whole.per_stage.sum(axis=0).tolist()
    half = untied[-1].parameters / 2
    assert (cut.parameters - whole.parameters).tolist() == [half, -half]
    # After the last transformer layer every stage receives the output of the final norm.
    assert cut.last_layers.tolist()[1:] == [len(untied) - 2] * 2


def test_a_tied_head_cannot_be_cut() -> None:
    with pytest.raises(ConfigError, match="leave vocabulary_stages false"):
        LayerCounter(GPT).count(GPT.partition("uniform", 2), 2, 1, vocabulary_stages=True)
