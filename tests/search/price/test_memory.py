import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.plan.layout import ParallelLayout
from deepspeed_ext.plan.memory import TokenBytes, memory_over_time, peak
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.schedules import SCHEDULES
from deepspeed_ext.plan.timeline import Span, Timeline
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.search.machine.trainers import MEGATRON_LM, SOFTWARE
from megatron_terapipe.search.price.activations import (
    SCORE_LIMIT,
    Limits,
    StageBytes,
    TokenMemory,
    peak_held,
    rank_order,
    steady_micro_batches,
)
from megatron_terapipe.search.price.memory import Counted, MemoryModel, MemoryOverheads, assemble, total_bytes
from megatron_terapipe.search.price.workload import Workload, gpt_workload
from megatron_terapipe.strategy import Strategy
from tests.search.price.machines import GPT, nodes

MIB = 2**20
COUNTS_ALONE = MemoryOverheads(
    framework_bytes=0.0, communicator_bytes=0.0, state_factor=1.0, activation_factor=1.0, working_factor=0.0
)


def workload(**sizes: object) -> Workload:
    values = {"num_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "seq_length": 2048, "vocab_size": 256}
    return gpt_workload(ModelConfig(**{**values, **sizes}))  # type: ignore[arg-type]


# Measured: deepspeed --num_accelerators 2 --module benchmarks.activation_memory, in docs/benchmarks, MiB of the first
# of two stages: GPT in fp32 with 4 micro-batches, by number of token slices.
MEASURED_GPT = {1: 524.8, 2: 422.6, 4: 371.5, 8: 345.9, 16: 333.1}
MEASURED_LLAMA_SELECTIVE = {1: 341.5, 2: 269.4, 4: 233.3, 8: 215.3, 16: 206.3}
LLAMA = {
    "position_embedding_type": "rope",
    "normalization": "rmsnorm",
    "activation": "swiglu",
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
    "num_key_value_heads": 4,
}


@pytest.mark.parametrize(
    ("parts", "recompute", "measured"), [({}, "none", MEASURED_GPT), (LLAMA, "selective", MEASURED_LLAMA_SELECTIVE)]
)
def test_measured_memory_of_the_engine(parts: dict[str, object], recompute: str, measured: dict[int, float]) -> None:
    for token_slices, expected in measured.items():
        strategy = Strategy(
            pipeline_parallel_size=2,
            num_token_slices=token_slices,
            global_batch_size=4,
            zero_stage=0,
            recompute=recompute,
        )
        first = MemoryModel(
            workload=workload(**parts), cluster=nodes(1, num_devices=2), precision="fp32", overheads=COUNTS_ALONE
        ).predict(strategy)[0]
        held = first.activations + first.key_values + first.buffers
        assert held / MIB == pytest.approx(expected, rel=0.02)


def test_parts_add_up_for_every_rank() -> None:
    model = MemoryModel(workload=workload(), cluster=nodes(1))
    strategy = Strategy(
        data_parallel_size=2,
        pipeline_parallel_size=4,
        num_token_slices=3,
        token_slices=(1024, 640, 384),
        global_batch_size=8,
    )
    ranks = model.predict(strategy)
    totals = [float(total_bytes(counted, model.overheads)) for counted in model.count(strategy)]
    assert [rank.total for rank in ranks] == pytest.approx(totals)
    # The first stage keeps most activations, the last one the logits; both have the word embedding.
    assert ranks[0].activations == max(rank.activations for rank in ranks)
    assert [rank.logits > 0 for rank in ranks] == [False, False, False, True]
    assert min(ranks[0].weights, ranks[3].weights) > max(ranks[1].weights, ranks[2].weights)


def test_ranks_of_bloom() -> None:
    """176 B parameters (arXiv 2211.05100 section 3.1): 70 layers of 12 h^2 + 13 h, 250,880 words; 4 x 12 ranks.

    Matrices and words are shared by four ranks; norms, positions and the biases after a reduction are on all of them.
    """
    hidden, words, size = 14336, 250880, 4
    bloom = workload(num_layers=70, hidden_size=hidden, num_attention_heads=112, vocab_size=words)
    assert bloom.parameters == pytest.approx(176.3e9, rel=0.001)
    bounds = (0, *range(5, 66, 6), 70)
    strategy = Strategy(tensor_parallel_size=size, pipeline_parallel_size=12, zero_stage=0, stage_partition=bounds)
    ranks = MemoryModel(
        workload=bloom, cluster=nodes(6), software=MEGATRON_LM, precision="fp16", overheads=COUNTS_ALONE
    ).predict(strategy)
    block = (12 * hidden**2 + 7 * hidden) / size + 6 * hidden
    assert ranks[1].weights == pytest.approx(2 * 6 * block)
    assert ranks[0].weights == pytest.approx(2 * (5 * block + words * hidden / size + 2048 * hidden))
    assert ranks[1].optimizer == pytest.approx(12 * 6 * block)


def test_a_limit_on_activations() -> None:
    """Qi et al. (arXiv 2401.10241 section 4): ZB-2p holds twice what 1F1B does, ZB-1p as much, on every rank."""
    model = MemoryModel(workload=workload(), cluster=nodes(1), software=MEGATRON_LM, precision="fp16")
    strategy = Strategy(pipeline_parallel_size=4, global_batch_size=16, zero_stage=0)
    plain = [rank.activations for rank in model.count(strategy)]
    for limit in (1.0, 2.0):
        limited = [rank.activations for rank in model.count(strategy, activation_limit=limit)]
        assert limited[0] == pytest.approx(limit * plain[0])
        assert limited[1] == pytest.approx(limit * plain[1] * 4 / 3)


def test_when_the_optimizer_steps_activations_are_gone() -> None:
    parts = dict.fromkeys(Counted._fields, 0.0)
    small, large = (
        Counted(**{**parts, "step": 10.0, "activations": 4.0}),
        Counted(**{**parts, "step": 3.0, "activations": 4.0}),
    )
    assert assemble(small, COUNTS_ALONE).buffers == 10 and assemble(small, COUNTS_ALONE).activations == 0
    assert assemble(large, COUNTS_ALONE).activations == 4 and assemble(large, COUNTS_ALONE).buffers == 0


def test_grids_of_counts_broadcast() -> None:
    counted = Counted(*(np.arange(3.0)[:, None] + np.arange(4.0) for _ in Counted._fields))
    overheads = MemoryOverheads()
    grid = np.asarray(total_bytes(counted, overheads))
    for index in np.ndindex(3, 4):
        one = Counted(*(part[index] for part in counted))
        assert grid[index] == pytest.approx(assemble(one, overheads).total)


def test_an_optimised_order_has_the_limit_of_1f1b() -> None:
    model = MemoryModel(workload=workload(), cluster=nodes(1))
    plain, optimised = (
        model.predict(Strategy(pipeline_parallel_size=4, global_batch_size=8, schedule=schedule))
        for schedule in ("1f1b", "optimised")
    )
    assert max(rank.activations for rank in optimised) >= max(rank.activations for rank in plain)
    assert max(rank.activations for rank in optimised) <= 1.4 * max(rank.activations for rank in plain)


@settings(max_examples=25)
@given(
    schedule=st.sampled_from(["gpipe", "1f1b", "zero-bubble", "interleaved"]),
    ranks=st.sampled_from([1, 2, 4]),
    token_slices=st.integers(1, 4),
    micro_batches=st.integers(1, 6),
)
def test_less_is_never_more(schedule: str, ranks: int, token_slices: int, micro_batches: int) -> None:
    """Recomputing more, sharing layers, and smaller micro-batches never take more memory."""
    # An additional communicator always takes memory.
    model = MemoryModel(workload=workload(), cluster=nodes(1), overheads=MemoryOverheads(communicator_bytes=0.0))
    base = {
        "pipeline_parallel_size": ranks,
        "num_token_slices": token_slices,
        "schedule": schedule,
        "num_model_chunks": 2 if schedule == "interleaved" and ranks > 1 else 1,
        "global_batch_size": 2 * micro_batches,
    }

    def held(**more: object) -> float:
        ranks = model.predict(Strategy(**{**base, **more}))  # type: ignore[arg-type]
        return max(rank.total for rank in ranks)

    by_mode = [held(recompute=mode) for mode in ("none", "selective", "full")]
    # Recomputed activations exist while their backward runs: with one micro-batch they save no memory.
    assert by_mode[0] * (1 + 1e-9) >= by_mode[1] and by_mode[1] * (1 + 1e-9) >= by_mode[2]
    assert held(tensor_parallel_size=2) < held()
    assert held(tensor_parallel_size=2, sequence_parallel=True) <= held(tensor_parallel_size=2)
    assert held() <= held(micro_batch_size=2) * (1 + 1e-9)


def states(software: str, precision: str, zero_stage: int, parameters: float) -> Counted:
    """Bytes of a rank of four replicas."""
    model = MemoryModel(workload=GPT, cluster=nodes(2), software=SOFTWARE[software], precision=precision)
    return model.states(parameters, layout=ParallelLayout(data_parallel_size=4), zero_stage=zero_stage)


@pytest.mark.parametrize(
    ("software", "precision", "zero_stage", "total"),
    [
        # ZeRO, arXiv 1910.02054 section 3.1: 2 + 2 + 12 = 16 bytes a parameter in half precision.
        ("terapipe", "fp16", 0, 16),
        ("terapipe", "fp16", 1, 2 + 2 + 12 / 4),
        ("deepspeed", "fp16", 1, 2 + 2 + 12 / 4),
        # Sums in fp32 take 4 bytes more, which no rank shares; ours has only these.
        ("deepspeed", "bf16", 1, 2 + 6 + 12 / 4),
        ("terapipe", "bf16", 1, 2 + 4 + 12 / 4),
        # fp32: two moments of 4 bytes each; ZeRO 1 keeps a copy of the weights in addition.
        ("terapipe", "fp32", 0, 16),
        ("terapipe", "fp32", 1, 8 + 12 / 4),
    ],
)
def test_bytes_of_a_parameter(software: str, precision: str, zero_stage: int, total: float) -> None:
    counted = states(software, precision, zero_stage, 1.0)
    assert counted.weights + counted.gradients + counted.optimizer == pytest.approx(total)


def test_a_group_of_ranks_divides_states_and_the_largest_layers_are_whole() -> None:
    model = MemoryModel(workload=GPT, cluster=nodes(2), software=SOFTWARE["fsdp"])
    held = model.states(1e9, layout=ParallelLayout(data_parallel_size=16), zero_stage=3, zero_shard_size=8)
    assert held.weights + held.gradients + held.optimizer == pytest.approx(16e9 / 8)
    assert held.buffers == 2 * 2 * max(layer.parameters for layer in GPT.layers)


def test_buckets_are_no_larger_than_the_model() -> None:
    assert states("deepspeed", "fp16", 1, 1e12).buffers == 2 * 2 * 500e6
    assert states("terapipe", "bf16", 1, 1e6).buffers == 2 * 4 * 1e6
    assert states("deepspeed", "fp16", 0, 1e12).buffers == 0


CASES = [
    ("1f1b", 4, 1, 1, (8,)),
    ("1f1b", 4, 3, 1, (4, 3, 1)),
    ("gpipe", 3, 2, 1, (5, 3)),
    ("zero-bubble", 4, 2, 1, (5, 3)),
    ("interleaved", 2, 1, 3, (8,)),
    ("interleaved", 4, 2, 2, (2, 6)),
    ("breadth-first", 2, 2, 2, (2, 6)),
]


def stage_bytes(stages: int, freed: float = 0.0) -> StageBytes:
    own = np.arange(1.0, stages + 1)
    logits = np.zeros(stages)
    logits[-1] = 7.0
    return StageBytes(
        TokenMemory(10 * own, own, 2 * own, logits, freed_by_input_gradient=10 * own * freed, state=5 * own)
    )


@pytest.mark.parametrize(("schedule", "ranks", "token_slices", "model_chunks", "lengths"), CASES)
def test_the_plans_own_account(
    schedule: str, ranks: int, token_slices: int, model_chunks: int, lengths: tuple[int, ...]
) -> None:
    """`plan.memory` counts the same over a timeline in which every op takes one second."""
    shape = PipelineShape(ranks * model_chunks, 6, token_slices, model_chunks)
    freed = 0.4 if schedule == "zero-bubble" else 0.0
    bytes_of = stage_bytes(shape.num_stages, freed)
    bytes_of = bytes_of._replace(limits=Limits(20.0))
    by_stage = map(tuple, bytes_of.token[:3])
    token_bytes = TokenBytes(*by_stage, 7.0, freed, logits_limit=20.0, state=tuple(bytes_of.token.state))
    orders = [list(SCHEDULES[schedule](shape, rank)) for rank in range(ranks)]
    spans = tuple(tuple(Span(op, index, index + 1) for index, op in enumerate(order)) for order in orders)
    curves = memory_over_time(Timeline(shape, spans), lengths, token_bytes)
    for rank, curve in enumerate(curves):
        found = peak_held(rank_order(schedule, shape, rank), lengths, bytes_of)
        assert sum(found) == pytest.approx(peak(curve))


@pytest.mark.parametrize(("schedule", "ranks", "token_slices", "model_chunks", "lengths"), CASES)
@pytest.mark.parametrize("num_micro_batches", [1, 2, 5, 9, 26, 31])
def test_more_micro_batches_repeat_the_peak(
    schedule: str, ranks: int, token_slices: int, model_chunks: int, lengths: tuple[int, ...], num_micro_batches: int
) -> None:
    enough = steady_micro_batches(schedule, ranks, token_slices, num_micro_batches)
    peaks = []
    for number in (enough, num_micro_batches):
        shape = PipelineShape(ranks * model_chunks, number, token_slices, model_chunks)
        held = [rank_order(schedule, shape, rank) for rank in range(ranks)]
        peaks.append([sum(peak_held(order, lengths, stage_bytes(ranks * model_chunks))) for order in held])
    assert peaks[0] == pytest.approx(peaks[1])
    assert schedule == "gpipe" or enough <= max(num_micro_batches, 1)


@pytest.mark.parametrize(
    ("token", "schedule", "micro_batches", "lengths", "kind", "expected"),
    [
        # F BI BW of each micro-batch: 1 is kept by a forward, and 3 between BI and BW.
        (TokenMemory(1.0, freed_by_input_gradient=-2.0), "zero-bubble", 2, (1,), "activations", 3),
        # Gradients in the reach of windows: bytes whatever the length, where a sequence has several token slices.
        (TokenMemory(0.0, window_gradients=5.0), "1f1b", 1, (6, 2), "key_values", 5),
        (TokenMemory(0.0, window_gradients=5.0), "1f1b", 1, (8,), "key_values", 0),
        # Scores have a limit.
        (TokenMemory(0.0, working=3.0, scores=SCORE_LIMIT / 4), "1f1b", 1, (2,), "working", SCORE_LIMIT / 2 + 6),
        (TokenMemory(0.0, working=3.0, scores=SCORE_LIMIT / 4), "1f1b", 1, (8,), "working", SCORE_LIMIT + 24),
        # Keys and values from latents: bytes whatever the length, of all heads, of as many as the limit, or of one.
        (TokenMemory(0.0, expanded=6.0, expanded_head=3.0), "1f1b", 1, (6, 2), "working", 6),
        (TokenMemory(0.0, expanded=12.0, expanded_head=3.0), "1f1b", 1, (6, 2), "working", 8),
        (TokenMemory(0.0, expanded=40.0, expanded_head=10.0), "1f1b", 1, (8,), "working", 10),
        # The backward of the MLP comes before the one of attention.
        (TokenMemory(0.0, working=3.0, attending=1.0, expanded=3.0), "1f1b", 1, (2,), "working", 6),
        (TokenMemory(0.0, working=3.0, attending=1.0, expanded=7.0), "1f1b", 1, (2,), "working", 9),
    ],
)
def test_peaks_by_hand(
    token: TokenMemory, schedule: str, micro_batches: int, lengths: tuple[int, ...], kind: str, expected: float
) -> None:
    order = rank_order(schedule, PipelineShape(1, micro_batches, len(lengths)), 0)
    of_stage = StageBytes(TokenMemory(*(np.full(1, each) for each in token)), limits=Limits(expanded=8.0))
    assert getattr(peak_held(order, lengths, of_stage), kind) == expected
