"""How many sequence-parallel ranks a model and its token slices allow."""

import pytest

from megatron_terapipe.arguments import build_config
from megatron_terapipe.errors import ConfigError

REQUIRED = {
    **{"num_layers": 2, "hidden_size": 96, "num_attention_heads": 12, "seq_length": 128, "micro_batch_size": 1},
    **{"train_iters": 10, "lr": 1e-3, "data_path": ("corpus",)},
}
TENSOR = {"tensor_model_parallel_size": 2}

# The values given, then the words that name the value and the rule, then those of the remedy.
REFUSALS = [
    ({"ds_sequence_parallel_size": 0}, "--ds-sequence-parallel-size 0 is not positive", "give 1 or more"),
    (
        {"ds_sequence_parallel_size": 5},
        "--num-attention-heads 12 is not a multiple of --ds-sequence-parallel-size 5, whose ranks share the heads",
        "change one of them",
    ),
    (
        {**TENSOR, "ds_sequence_parallel_size": 4},
        "--num-attention-heads 12 is not a multiple of --ds-sequence-parallel-size 4 x --tensor-model-parallel-size 2 "
        "= 8, whose ranks",
        "change one of them",
    ),
    (
        {"ds_sequence_parallel_size": 4, "num_key_value_heads": 6},
        "--num-key-value-heads 6 can be dealt to --ds-sequence-parallel-size 4 neither by whole heads nor by whole",
        "give a multiple or a divisor of 4",
    ),
    (
        {**TENSOR, "ds_sequence_parallel_size": 3, "num_key_value_heads": 4},
        "--num-key-value-heads 4, which are 2 on each of 2 tensor-parallel ranks, can be dealt to --ds-sequence-",
        "give a multiple or a divisor of 3",
    ),
    (
        {"ds_sequence_parallel_size": 2, "token_slices": "64,61,3"},
        "--ds-sequence-parallel-size 2 deals each token slice to 2 ranks, but one has 61 tokens",
        "that are multiples of 2",
    ),
    (
        {**TENSOR, "sequence_parallel": True, "ds_sequence_parallel_size": 2, "token_slices": "64,62,2"},
        "--ds-sequence-parallel-size 2 and --sequence-parallel deal each token slice to 4 ranks, but one has 62 tokens",
        "that are multiples of 4",
    ),
    (
        {"ds_sequence_parallel_size": 4, "num_token_slices": 33},
        "--token-slices: 33 token slices of 128 tokens, each a multiple of 4",
        "give between 1 and 32 token slices",
    ),
]


@pytest.mark.parametrize(("given", "rule", "remedy"), REFUSALS)
def test_what_ranks_cannot_share_is_refused_in_one_line(given: dict[str, object], rule: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config({**REQUIRED, **given})
    line = str(caught.value)
    assert line.startswith(rule) and line.endswith(remedy) and "\n" not in line


@pytest.mark.parametrize("key_heads", [1, 2, 4, 12])
def test_key_heads_may_be_fewer_than_the_ranks_that_share_them(key_heads: int) -> None:
    parallel = build_config({**REQUIRED, "num_key_value_heads": key_heads, "ds_sequence_parallel_size": 4}).parallel
    assert parallel.layout(8).data_parallel_size == 2
    assert parallel.least_world_size == parallel.ranks_of_a_replica == 4
