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
