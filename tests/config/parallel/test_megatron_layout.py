"""Megatron's text for the layers of each stage."""

import pytest

from megatron_terapipe.config import ParallelConfig
from megatron_terapipe.config.pipeline import layout_stages
from megatron_terapipe.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "num_ranks", "bounds", "model_chunks"),
    [
        ("EtL", 1, (0, 1), 1),
        ("Ett|tttL", 2, (0, 2, 5), 1),
        ("Et*3|(tt|)*6t*2L", 4, (0, 3, 5, 7, 9, 11, 13, 15, 17), 2),
        ("E,t,|,(t,t|)*2, tL", 2, (0, 1, 3, 5, 6), 2),
        ("E(t)*2|tL", 2, (0, 2, 3), 1),
        ("E((t|)*2)*2tL", 5, (0, 1, 2, 3, 4, 5), 1),
    ],
)
def test_what_it_says(text: str, num_ranks: int, bounds: tuple[int, ...], model_chunks: int) -> None:
    partition, found = layout_stages(text, num_ranks)
    assert (partition.bounds, found) == (bounds, model_chunks)


@pytest.mark.parametrize(
    ("text", "num_ranks", "said"),
    [
        ("E|t|tL", 3, "stage 0 has no transformer layer"),
        ("Et|t|L", 3, "stage 2 has no transformer layer"),
        ("Et|m|tL", 3, "m is for multi-token prediction"),
        ("Et|x|tL", 3, "x is not among E, t and L"),
        ("t|EtL", 2, "does not begin with its one E"),
        ("Et|tL|t", 3, "end with its one L"),
        ("Et|t|tL", 2, "3 stages, not a multiple of --pipeline-model-parallel-size 2"),
        ("E(t|tL", 2, "a repetition is written"),
        ("Et*99999L", 1, "more than 10,000 symbols"),
        ("E((((t*9)*9)*9)*9)*9L", 1, "more than 10,000 symbols"),
    ],
)
def test_what_cannot_be_dealt_so(text: str, num_ranks: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        layout_stages(text, num_ranks)


def test_it_stands_for_a_list_and_a_number_of_model_chunks() -> None:
    config = ParallelConfig(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et*3|t|tt|tL")
    listed = ParallelConfig(pipeline_model_parallel_size=2, num_model_chunks=2, stage_partition="0,3,4,6,7")
    assert config == listed


@pytest.mark.parametrize(
    ("other", "value"),
    [("stage_partition", "0,1,2"), ("num_model_chunks", 2), ("num_layers_per_virtual_pipeline_stage", 1)],
)
def test_it_stands_alone(other: str, value: object) -> None:
    words = f"--{other.replace('_', '-')} {value} both deal layers: drop the latter"
    with pytest.raises(ConfigError, match=words):
        ParallelConfig(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et|tL", **{other: value})
