"""Costs of ops, counted by hand where they can be: FLOPs of each stage's layers, the head, and what short ops lose."""

import pytest

from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.config import Config
from megatron_terapipe.config.flops import (
    LOGITS_AT_ONCE,
    attention_flops_per_position,
    block_forward_flops,
    linear_flops_per_token,
    logits_flops_per_token,
)
from megatron_terapipe.planning.op_costs import ROWS_LOST_PER_OP, blocks_of_stages, op_costs, stage_terms

REQUIRED = (
    "--num-layers 6 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --vocab-size 257 --micro-batch-size 2 "
    "--train-iters 10 --lr 1e-3 --data-path corpus --pipeline-model-parallel-size 2 --token-slices 64,48,16 "
)


def parse(words: str = "") -> Config:
    return parse_arguments((REQUIRED + words).split())


@pytest.mark.parametrize("words", ["", "--num-model-chunks 3", "--num-query-groups 2 --swiglu"])
def test_forwards_are_the_flops_of_the_layers_and_the_head_and_what_an_op_loses(words: str) -> None:
    config = parse(words)
    model, costs, parallel = config.model, op_costs(config), config.parallel
    lost = ROWS_LOST_PER_OP / 2
    for stage in range(parallel.num_stages):
        layers = 6 // parallel.num_stages
        head = logits_flops_per_token(model) if stage == parallel.num_stages - 1 else 0
        for index, (start, end) in enumerate(((0, 64), (64, 112), (112, 128))):
            block = model.blocks[0]
            of_layers = layers * block_forward_flops(model, block, end - start, start)
            per_row = layers * linear_flops_per_token(model, block) + head
            expected = of_layers + head * (end - start) + lost * per_row
            assert costs.forward[stage][index] == pytest.approx(expected, rel=1e-12)


def test_gradients_are_as_many_products_and_attention_and_head_are_all_in_those_of_the_inputs() -> None:
    config = parse()
    model, costs = config.model, op_costs(config)
    attention = 3 * attention_flops_per_position(model, model.blocks[0])
    attended = [64 * 65 / 2, 48 * 64 + 48 * 49 / 2, 16 * 112 + 16 * 17 / 2]
    for stage in range(2):
        for index, positions in enumerate(attended):
            head = stage * logits_flops_per_token(model) * ((64, 48, 16)[index] + ROWS_LOST_PER_OP / 2)
            products = costs.forward[stage][index] - attention * positions
            of_inputs = products + head + 2.5 * attention * positions
            assert costs.backward[stage][index] == pytest.approx(of_inputs, rel=1e-12)
            assert costs.weight_gradient[stage][index] == pytest.approx(products - head, rel=1e-12)


def test_logits_are_computed_again_as_far_as_they_are_more_than_may_be_alive() -> None:
    usual = parse()
    many = parse(f"--micro-batch-size {4 * LOGITS_AT_ONCE // (128 * usual.model.padded_vocab_size())}")
    (_, before), (_, after) = (stage_terms(config) for config in (usual, many))
    again = after.input_gradient.linear - before.input_gradient.linear
    # All but a fourth of them; to the last whole sequence.
    assert again == pytest.approx(0.75 * logits_flops_per_token(usual.model), rel=1e-3)


def test_full_recomputation_computes_the_layers_again_but_not_the_head() -> None:
    plain, recomputed = op_costs(parse()), op_costs(parse("--recompute-granularity full"))
    assert recomputed.forward == plain.forward
    assert recomputed.weight_gradient == plain.weight_gradient
    for stage in range(2):
        for index, before in enumerate(plain.backward[stage]):
            again = recomputed.backward[stage][index] - before
            assert again == pytest.approx(plain.forward[0][index], rel=1e-12), "stage 0 has as many layers, and no head"
    assert op_costs(parse("--recompute-granularity selective")) == plain


def test_tensor_parallel_ranks_share_the_work() -> None:
    alone, shared = op_costs(parse()), op_costs(parse("--tensor-model-parallel-size 2"))
    for one, half in zip(sum(alone.forward, ()), sum(shared.forward, ()), strict=True):
        assert half == pytest.approx(one / 2, rel=1e-12)


def test_a_short_token_slice_costs_more_than_its_share() -> None:
    terms = stage_terms(parse())[0].forward
    assert 2 * terms.cost(0, 8) > 1.5 * terms.cost(0, 16)
    bigger = stage_terms(parse("--micro-batch-size 64"))[0].forward
    assert 2 * bigger.cost(0, 8) < 1.2 * bigger.cost(0, 16)


@pytest.mark.parametrize(
    ("words", "blocks"),
    [
        ("", [range(0, 3), range(3, 6)]),
        ("--stage-partition 0,1,6", [range(0, 1), range(1, 6)]),
        ("--decoder-last-pipeline-num-layers 2", [range(0, 4), range(4, 6)]),
        ("--num-model-chunks 2", [range(0, 2), range(2, 4), range(4, 5), range(5, 6)]),
        # The embedding weighs as much as many layers, and is twice there.
        ("--stage-partition parameters --vocab-size 50257 --pipeline-model-parallel-size 3", None),
    ],
)
def test_blocks_of_stages(words: str, blocks: list[range] | None) -> None:
    expected = blocks or [range(0, 0), range(0, 6), range(6, 6)]
    assert [list(found) for found in blocks_of_stages(parse(words))] == [list(each) for each in expected]
