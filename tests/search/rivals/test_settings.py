"""Which ways there are to run ZeRO 3 with Ulysses, and which of them is chosen."""

import pytest

from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.machine.cluster_files import parse_cluster
from megatron_terapipe.search.price.cost_model import Pricing
from megatron_terapipe.search.price.workload_files import read_workload
from megatron_terapipe.search.rank.rivals import Rival, all_settings, best_rival, has_rival


def h100(nodes: int, **host: str) -> Cluster:
    node = {"machine": "dgx-h100", "count": nodes, "host": host}
    return parse_cluster({"nodes": [node]}, "c.json")[0]


def best(model: str, seq_length: int, nodes: int, batch: int = 1, **host: str) -> Rival:
    found = best_rival(Pricing(read_workload(model, {"seq_length": seq_length}), h100(nodes, **host)), batch)
    assert found is not None
    return found


def test_ranks_divide_heads_tokens_and_the_batch() -> None:
    workload = read_workload("llama3-8b", {"seq_length": 131072})
    tried = list(all_settings(workload, 256, 4))
    # 32 heads, 4 sequences: 128 of 256 devices, and no fewer.
    assert {(each.sequence_parallel_size, each.data_parallel_size) for each in tried} == {(32, 4)}
    assert {each.num_sequences for each in tried} == {4}
    sizes = {each.sequence_parallel_size for each in all_settings(workload, 24, 24)}
    assert sizes == {1, 2, 4, 8}


def test_memory_that_is_free_is_used_before_the_host() -> None:
    assert best("llama3-8b", 131072, 1).settings.on_host == ()
    long = best("llama3-8b", 2_000_000, 1)
    assert long.fits and "checkpoints" in long.settings.on_host


def test_what_does_not_fit_is_the_nearest_to_fitting() -> None:
    found = best("llama3-70b", 1_048_576, 1, memory="500 GB")
    assert not found.fits
    assert found.time.total_s > 0


@pytest.mark.parametrize(("length", "priced"), [(16384, False), (32768, True)])
def test_only_long_sequences_have_a_rival(length: int, priced: bool) -> None:
    assert has_rival(Pricing(read_workload("llama3-8b", {"seq_length": length}), h100(1))) is priced
