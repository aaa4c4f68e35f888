"""Token slices and layers of the ranks that share them."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ext.plan.slicing import TokenSlices
from megatron_terapipe.arguments import build_config, parse_arguments
from megatron_terapipe.config import Config, ModelConfig, flops
from megatron_terapipe.config.flops import TILE, balanced_token_slices
from megatron_terapipe.strategy import Strategy


def config(tensor_parallel_size: int, seq_length: int, **settings: Any) -> Config:
    return build_config(
        {
            **{"num_layers": 2, "hidden_size": 64, "num_attention_heads": 16, "seq_length": seq_length, "lr": 1e-3},
            **{"micro_batch_size": 1, "train_iters": 10, "data_path": ("corpus",)},
            **{"tensor_model_parallel_size": tensor_parallel_size, **settings},
        }
    )


@given(
    sizes=st.sampled_from([(2, 1), (4, 1), (8, 1), (16, 1), (1, 2), (1, 16), (2, 2), (2, 8), (8, 2)]),
    per_rank=st.integers(1, 600),
    balanced=st.booleans(),
    data=st.data(),
)
def test_every_rank_that_shares_tokens_gets_as_much_of_each_token_slice(
    sizes: tuple[int, int], per_rank: int, balanced: bool, data: st.DataObject
) -> None:
    tensor, sequence = sizes
    size, count = tensor * sequence, data.draw(st.integers(1, min(per_rank, 12)))
    settings = {"num_token_slices": count, "sequence_parallel": True, "ds_sequence_parallel_size": sequence}
    settings |= {"token_slices": "balanced"} if balanced else {}
    cut = config(tensor, size * per_rank, **settings).token_slices()
    assert len(cut) == count
    assert cut.seq_length == size * per_rank
    assert all(length % size == 0 for length in cut.lengths)
    if not balanced:
        assert max(cut.lengths) - min(cut.lengths) in (0, size)


def test_without_sequence_parallelism_every_rank_gets_all_of_it() -> None:
    assert config(4, 127, num_token_slices=2).token_slices().lengths == (64, 63)
    assert config(4, 128, sequence_parallel=True, num_token_slices=3).token_slices().lengths == (44, 44, 40)


def test_cuts_by_documents_of_one_document_are_balanced() -> None:
    sequence = {"num_token_slices": 4, "sequence_parallel": True, "ds_sequence_parallel_size": 3}
    sequence |= {"num_attention_heads": 12, "kv_channels": 8}
    by_documents = {"token_slices": "balanced-by-documents", "reset_attention_mask": True}
    cuts = config(2, 18432, **sequence, **by_documents).document_cuts()
    balanced = config(2, 18432, **sequence, token_slices="balanced").token_slices()
    assert cuts is not None
    assert cuts.quantum == 576  # an eighth of the average, in whole tiles of 16 tokens that 6 ranks can share
    for found, wanted in zip(cuts.cut([(0,)]).bounds(), balanced.bounds(), strict=True):
        assert found == pytest.approx(wanted, abs=cuts.quantum)
    assert config(2, 18432, **sequence).document_cuts() is None


@pytest.mark.parametrize("granularity", [1, 4, 16, 24, 48])
def test_balanced_token_slices_are_whole_tiles_where_they_are_long(granularity: int) -> None:
    cut = balanced_token_slices(small(4608), 6, granularity=granularity)
    assert all(length % TILE == 0 and length % granularity == 0 for length in cut.lengths)
    assert cut.lengths[0] > cut.lengths[-1]


def cost_of(model: ModelConfig, start: int, end: int) -> float:
    """Forward and backward of all layers, token by token: products thrice, attention 3.5 times."""
    cost = 0.0
    for block in model.blocks:
        linear, each = flops.linear_flops_per_token(model, block), flops.attention_flops_per_position(model, block)
        seen = sum(min(position + 1, block.window or model.seq_length) for position in range(start, end))
        cost += 3 * linear * (end - start) + 3.5 * each * seen
    return cost


def ends_are_nearest(model: ModelConfig, cut: TokenSlices) -> None:
    """Check that half a tile before each end the work is too little, and half a tile after it too much."""
    whole = cost_of(model, 0, model.seq_length)
    for index, (_, end) in enumerate(list(cut.bounds())[:-1], start=1):
        share = whole * index / len(cut)
        assert cost_of(model, 0, end - TILE // 2) <= share <= cost_of(model, 0, end + TILE // 2)


NO_ATTENTION = '{"attention": {"no_op": true}}'


def small(seq_length: int, entries: str = "", *, num_layers: int = 2, **settings: Any) -> ModelConfig:
    """A model of a few layers, some of them described."""
    if entries:
        settings["heterogeneous_layers_config_path"] = f'{{"block_configs": {entries}}}'
    return ModelConfig(num_layers=num_layers, hidden_size=64, num_attention_heads=4, seq_length=seq_length, **settings)


@pytest.mark.parametrize(
    "model",
    [
        small(2048),
        small(2048, '[{"mlp": {"no_op": true}}, {"mlp": {"no_op": true}}]'),
        small(2048, f"[{NO_ATTENTION}, {{}}]"),
        small(2048, '[{"attention": {"num_query_groups": 1}, "mlp": {"ffn_hidden_size": 2000}}, {}]'),
        *(
            small(2048, sliding_window=window, window_attn_skip_freq=without)
            for window in (1, 100, 1024, 2047)
            for without in (None, "2")
        ),
    ],
)
def test_token_slices_cost_the_same(model: ModelConfig) -> None:
    cut = balanced_token_slices(model, 4)
    ends_are_nearest(model, cut)
    if model.sliding_window is None:
        costs, uneven = (
            [cost_of(model, start, end) for start, end in each.bounds()] for each in (cut, TokenSlices.uniform(2048, 4))
        )
        assert max(costs) < max(uneven)


def test_token_slices_beyond_a_full_window_are_equally_long() -> None:
    model = small(8192, num_layers=1, sliding_window=512)
    first, *others = balanced_token_slices(model, 8).lengths
    assert first > max(others)
    assert max(others) - min(others) <= TILE
    whole = balanced_token_slices(replace(model, sliding_window=None), 8).lengths
    assert whole[1] > 2 * whole[-1]
    # Layers without attention are cut evenly.
    assert balanced_token_slices(small(2048, f"[{NO_ATTENTION}]", num_layers=1), 4).lengths == (512,) * 4


@pytest.mark.parametrize(("size", "seq_length", "count"), [(5, 130, 2), (7, 259, 4), (3, 195, 3), (5, 325, 4)])
def test_odd_numbers_of_ranks(size: int, seq_length: int, count: int) -> None:
    """A tile that suits both kernels and ranks may be longer than the token slices."""
    cut = balanced_token_slices(small(seq_length), count, granularity=size)
    assert len(cut) == count
    assert all(length % size == 0 for length in cut.lengths)
    assert max(cut.lengths) <= 2 * seq_length / count


@pytest.mark.parametrize("key_heads", [1, 2, 4, 16])
def test_key_heads_may_be_fewer_than_the_ranks_that_share_them(key_heads: int) -> None:
    parallel = config(1, 128, num_key_value_heads=key_heads, ds_sequence_parallel_size=4).parallel
    assert parallel.layout(8).data_parallel_size == 2
    assert parallel.least_world_size == parallel.ranks_of_a_replica == 4


UNTIED = "--untie-embeddings-and-output-weights --vocabulary-stages --pipeline-model-parallel-size 2"


def parsed(flags: str) -> object:
    model = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --vocab-size 300"
    return parse_arguments(f"{model} --micro-batch-size 1 --train-iters 1 --lr 1 --mock-data {flags}".split())


def test_each_rank_has_one_more_stage() -> None:
    parallel = parsed(f"{UNTIED} --num-model-chunks 2 --num-token-slices 2").parallel
    assert parallel.num_stages == 4
    pipeline = parallel.pipeline(3)
    assert (pipeline.num_stages, pipeline.num_model_chunks, pipeline.num_ranks) == (6, 3, 2)
    assert parallel.pipeline_schedule == "optimised"
    assert Strategy.of_config(parsed(UNTIED), 1).stages_of_a_rank == 2


def test_one_rank_keeps_its_output_layer_whole() -> None:
    parallel = parsed("--vocabulary-stages").parallel
    assert (parallel.vocabulary_stages, parallel.vocabulary_parts) == (False, 1)
