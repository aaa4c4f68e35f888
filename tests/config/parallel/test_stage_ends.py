"""Fewer layers on the stages that hold the embedding and the output layer."""

import pytest

from megatron_terapipe.config import ParallelConfig
from megatron_terapipe.errors import ConfigError

FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"


@pytest.mark.parametrize(
    ("num_stages", "ends", "bounds"),
    [
        (4, {}, (0, 3, 6, 8, 10)),
        (4, {LAST: 1}, (0, 3, 6, 9, 10)),
        (4, {FIRST: 1}, (0, 1, 4, 7, 10)),
        (4, {FIRST: 2, LAST: 1}, (0, 2, 6, 9, 10)),
        (3, {FIRST: 4, LAST: 5}, (0, 4, 5, 10)),
    ],
)
def test_the_others_share_the_rest_evenly(num_stages: int, ends: dict[str, int], bounds: tuple[int, ...]) -> None:
    parallel = ParallelConfig(pipeline_model_parallel_size=num_stages, **ends)
    assert parallel.uniform_stages(10).bounds == bounds


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({LAST: 2}, "--decoder-last-pipeline-num-layers 2 leave no other stage for the rest of the layers: raise"),
        (
            {"pipeline_model_parallel_size": 2, LAST: 2, "stage_partition": "parameters"},
            "--decoder-last-pipeline-num-layers 2 and --stage-partition parameters both deal layers to stages: drop",
        ),
        (
            {"pipeline_model_parallel_size": 3, FIRST: 5, LAST: 5},
            "the first and last stage leave 0 of 10 layers for 1 stages: give --decoder-first-pipeline-num-layers or",
        ),
        (
            {"pipeline_model_parallel_size": 2, FIRST: 0},
            "--decoder-first-pipeline-num-layers 0 is not positive: give 1",
        ),
    ],
)
def test_ends_that_do_not_fit(given: dict[str, object], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ParallelConfig(**given).uniform_stages(10)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


EMBEDDING, OUTPUT = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"


@pytest.mark.parametrize(
    ("num_layers", "given", "bounds"),
    [
        (10, {EMBEDDING: True, OUTPUT: True, "pipeline_model_parallel_size": 4}, (0, 2, 5, 8, 10)),
        (11, {EMBEDDING: True, "pipeline_model_parallel_size": 4}, (0, 2, 5, 8, 11)),
        (11, {OUTPUT: True, "pipeline_model_parallel_size": 4}, (0, 3, 6, 9, 11)),
        (
            6,
            {EMBEDDING: True, OUTPUT: True, "pipeline_model_parallel_size": 2, "num_model_chunks": 2},
            (0, 1, 3, 5, 6),
        ),
        (
            6,
            {EMBEDDING: True, OUTPUT: True, "pipeline_model_parallel_size": 2}
            | {"num_layers_per_virtual_pipeline_stage": 2},
            (0, 1, 3, 5, 6),
        ),
    ],
)
def test_embedding_and_output_layer_may_count_as_layers(
    num_layers: int, given: dict[str, object], bounds: tuple[int, ...]
) -> None:
    parallel = ParallelConfig(**given).for_layers(num_layers)
    partition = parallel.stage_bounds()
    assert partition is not None and partition.bounds == bounds
    assert parallel.num_stages == len(bounds) - 1


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            {EMBEDDING: True, "pipeline_model_parallel_size": 4},
            "--num-layers 10 with 1 more for --account-for-embedding-in-pipeline-split and --account-for-loss-in-",
        ),
        ({EMBEDDING: True, OUTPUT: True, "pipeline_model_parallel_size": 12}, "--num-layers 10 with 2 more for"),
        (
            {OUTPUT: True, "pipeline_model_parallel_size": 4, LAST: 2},
            "--account-for-loss-in-pipeline-split and --decoder-last-pipeline-num-layers 2 both deal layers to stages",
        ),
        (
            {OUTPUT: True, "pipeline_model_parallel_size": 2, "stage_partition": "0,5,10"},
            "--account-for-loss-in-pipeline-split and --stage-partition 0,5,10 both deal layers to stages: drop one",
        ),
    ],
)
def test_layers_that_cannot_be_counted_so(given: dict[str, object], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ParallelConfig(**given).for_layers(10)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)
