"""A small answer of a search, made by hand."""

from collections import Counter

from megatron_terapipe.search.answer.answer import Answer
from megatron_terapipe.search.machine.cluster_files import parse_cluster
from megatron_terapipe.search.price.prediction import Prediction, RankMemory, TimeBreakdown
from megatron_terapipe.search.price.workload_files import parse_workload
from megatron_terapipe.search.rank.ranked import Ranked
from megatron_terapipe.search.rank.rules import SearchCounts
from megatron_terapipe.search.rank.space import SearchProblem
from megatron_terapipe.strategy import Strategy

PARTS = ("weights", "gradients", "optimizer", "activations", "key_values", "logits", "buffers", "framework")


def prediction(compute_s: float, bubble_s: float, *, ranks: int, peak: float = 8e9) -> Prediction:
    breakdown = TimeBreakdown(
        compute_s=compute_s,
        tensor_parallel_s=0.1,
        bubble_s=bubble_s,
        transfer_s=0.02,
        gradient_reduction_s=0.05,
        shared_weight_s=0.0,
        optimizer_s=0.01,
        fixed_s=0.02,
    )
    memory = RankMemory(**dict.fromkeys(PARTS, peak / len(PARTS)))
    time_s = breakdown.total_s
    return Prediction(
        iteration_time_s=time_s,
        bubble_ratio=bubble_s / time_s,
        breakdown=breakdown,
        memory=(memory,) * ranks,
        interval_s=(0.9 * time_s, 1.2 * time_s),
        notes=("micro-batches extrapolated",),
    )


def answer(name: str = "tiny") -> Answer:
    """Two strategies that run and one that does not."""
    workload = parse_workload(
        {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 128, "vocab_size": 257}, "m.json"
    )
    cluster, notes = parse_cluster(
        {"name": name, "nodes": [{"name": "a", "count": 2, "device": "A100-80GB"}]}, "c.json"
    )
    best = Strategy(
        data_parallel_size=2,
        tensor_parallel_size=2,
        pipeline_parallel_size=4,
        num_token_slices=2,
        token_slices=(80, 48),
        micro_batch_size=1,
        global_batch_size=8,
    )
    second = Strategy(
        data_parallel_size=2, tensor_parallel_size=2, pipeline_parallel_size=4, micro_batch_size=1, global_batch_size=8
    )
    return Answer(
        problem=SearchProblem(workload=workload, cluster=cluster, global_batch_size=8),
        global_batch_size=8,
        entries=[
            Ranked(rank=1, strategy=best, prediction=prediction(1.0, 0.2, ranks=4)),
            Ranked(rank=2, strategy=second, prediction=prediction(0.9, 0.8, ranks=4)),
            Ranked(
                rank=3,
                strategy=Strategy(data_parallel_size=16, global_batch_size=16),
                prediction=None,
                feasible=False,
                reason="[why] <it> falls",
            ),
        ],
        counts=SearchCounts(
            total=5000, rejected=Counter({"does not fit <memory>": 3000, "batch": 1000, "nothing": 0}), priced=1000
        ),
        search_s=0.5,
        notes=notes,
    )
