"""An MFU that nobody has published is doubted, and the constant behind it is named."""

from dataclasses import replace

import pytest

from megatron_terapipe.devices import GENERATION_NAMES
from megatron_terapipe.search.answer.advice import Advice, advice_notes, advice_part
from megatron_terapipe.search.answer.figures import flops_utilization
from megatron_terapipe.search.answer.utilisation import PUBLISHED, best_published, check_utilization
from megatron_terapipe.search.machine.cluster_files import parse_cluster
from megatron_terapipe.search.price.cost_model import Pricing
from megatron_terapipe.search.price.workload_files import read_workload
from megatron_terapipe.search.rank.ranked import Ranked
from megatron_terapipe.search.rank.space import SearchProblem
from megatron_terapipe.strategy import Strategy

WORKLOAD = read_workload("gpt3-6.7b", {})
ONE_NODE = parse_cluster({"nodes": [{"device": "A100-80GB", "devices": 8}]}, "cluster")[0]
STRATEGY = Strategy(data_parallel_size=1, tensor_parallel_size=8, micro_batch_size=4, global_batch_size=64)


def test_the_table_is_of_generations_that_there_are() -> None:
    assert set(PUBLISHED) <= set(GENERATION_NAMES)
    for each in PUBLISHED.values():
        assert 0.3 < each.several_nodes.share <= each.one_node.share < 0.7


def test_one_node_and_several_have_their_own_figures() -> None:
    assert best_published(ONE_NODE) == PUBLISHED["ampere"].one_node
    several, mixed = (
        parse_cluster({"nodes": [{"device": name, "devices": 8} for name in names]}, "cluster")[0]
        for names in (("A100-80GB", "A100-40GB"), ("A100-80GB", "H100"))
    )
    assert best_published(several) == PUBLISHED["ampere"].several_nodes
    assert best_published(mixed) is None


def test_a_time_that_nobody_reached_is_doubted() -> None:
    pricing = Pricing(WORKLOAD, ONE_NODE)
    believable = Ranked(strategy=STRATEGY, prediction=pricing.predict(STRATEGY))
    assert check_utilization(believable, pricing.cost_model) is None

    perfect = replace(
        pricing.cost_model.efficiency, gemm_efficiency=1.0, memory_efficiency=1.0, inside_efficiency=1.0, gemm_area=1.0,
        launch_s=1e-7, gemm_depth=1.0,
    )  # fmt: skip
    strategy = replace(STRATEGY, data_parallel_size=8, tensor_parallel_size=1)
    fast = Pricing(WORKLOAD, ONE_NODE, efficiency=perfect)
    entry = Ranked(strategy=strategy, prediction=fast.predict(strategy))
    check = check_utilization(entry, fast.cost_model)
    assert check is not None and check.predicted > check.published.share + 0.03
    doubted = check.constant
    assert doubted is not None and doubted.name == "gemm_efficiency"
    assert doubted.value == 1.0 and doubted.needed is not None
    # With the value that is named, the same strategy has the published utilisation.
    honest = Pricing(WORKLOAD, ONE_NODE, efficiency=replace(perfect, gemm_efficiency=doubted.needed))
    time_s = honest.predict(strategy).iteration_time_s
    used = flops_utilization(strategy, WORKLOAD, ONE_NODE, time_s, "bf16", causal=True)
    assert used == pytest.approx(check.published.causal_share, rel=0.02)
    problem = SearchProblem(workload=WORKLOAD, cluster=ONE_NODE, global_batch_size=64)
    (note,) = advice_notes(Advice(utilization=check), problem)
    assert "the best published for such devices is 64%" in note and "gemm_efficiency" in note


def test_long_sequences_are_compared_with_causal_attention() -> None:
    long = read_workload("gpt3-6.7b", {"seq_length": 131072})
    pricing = Pricing(long, ONE_NODE)
    strategy = replace(STRATEGY, micro_batch_size=1, global_batch_size=4)
    check = check_utilization(Ranked(strategy=strategy, prediction=pricing.predict(strategy)), pricing.cost_model)
    assert check is not None and check.predicted > check.published.share + 0.03 > check.predicted_causal
    # No constant is in doubt: the usual count has scores that nobody computes.
    assert check.constant is None
    (note,) = advice_notes(
        Advice(utilization=check), SearchProblem(workload=long, cluster=ONE_NODE, global_batch_size=4)
    )
    assert note.endswith("compare the causal MFU")
    part = advice_part(Advice(utilization=check)).utilization
    assert part is not None and part.predicted_causal < part.predicted
    assert part.constant is None and part.value is None and part.needed is None


def test_causal_shares_are_those_of_the_shapes() -> None:
    runs = {
        "MPT-7B": (32, 4096, 2048, 24 * 4096**2, 50432),
        "a GPT of 1T": (128, 25600, 2048, 24 * 25600**2, 51200),
        "Nemotron-4 15B": (32, 6144, 4096, 2 * 6144 * (2 * 6144 + 2 * 1024) + 4 * 6144 * 24576, 256000),
    }
    for each in PUBLISHED.values():
        for published in (each.one_node, each.several_nodes):
            for name, (layers, hidden, tokens, products, vocab) in runs.items():
                if published.run.startswith(name):
                    whole = layers * (products + 4 * tokens * hidden) + 2 * hidden * vocab
                    causal = whole - layers * 2 * tokens * hidden
                    assert published.causal_share == pytest.approx(published.share * causal / whole, abs=0.001)
