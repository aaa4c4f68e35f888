"""Schedule and stages of a run, by its flags, and the bytes of its token slices that wait on the host."""

from dataclasses import replace
from pathlib import Path

import pytest

from deepspeed_ext.plan.ops import PipelineShape, Placement
from deepspeed_ext.plan.schedule_file import write_schedule
from deepspeed_ext.plan.schedules import SCHEDULES, one_f_one_b, rank_orders
from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.config import Config
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.planning import (
    check_schedule,
    expert_exchange,
    host_copies,
    pipeline_schedule,
    plan_run,
    proven_schedule,
)
from megatron_terapipe.strategy import Strategy

REQUIRED = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2 --train-iters 10 "
    "--lr 1e-3 --data-path corpus --pipeline-model-parallel-size 2 "
)


def warning(config: Config, *micro_batches: int, queues: int | None = None, name: str = "") -> str | None:
    """The warning about the schedule of a run, or about one of another name."""
    schedule = SCHEDULES[name] if name else pipeline_schedule(config, 1)
    return check_schedule(proven_schedule(schedule, config, 1, queues), config, micro_batches)


def parse(words: str = "") -> Config:
    return parse_arguments((REQUIRED + words).split())


@pytest.mark.parametrize(
    ("words", "schedule", "num_model_chunks"),
    [
        ("", "1f1b", 1),
        ("--pipeline-schedule gpipe", "gpipe", 1),
        ("--pipeline-schedule zero-bubble", "zero-bubble", 1),
        ("--enable-zbh1-pipeline", "zero-bubble", 1),
        ("--enable-zbh1-pipeline --enable-zbh1-exact-semantics", "zero-bubble", 1),
        ("--pipeline-schedule interleaved", "interleaved", 1),
        ("--num-model-chunks 2", "interleaved", 2),
        ("--num-virtual-stages-per-pipeline-rank 4", "interleaved", 4),
        ("--num-layers-per-virtual-pipeline-stage 1", "interleaved", 4),
        ("--num_layers_per_virtual_pipeline_stage 2", "interleaved", 2),
        ("--num-layers-per-virtual-pipeline-stage 4", "1f1b", 1),
        ("--num-model-chunks 2 --pipeline-schedule gpipe", "gpipe", 2),
        ("--num-model-chunks 2 --pipeline-schedule optimised --model-chunk-placement v", "optimised", 2),
    ],
)
def test_default_cluster_and_flags(words: str, schedule: str, num_model_chunks: int) -> None:
    parallel = parse(words).parallel
    assert (parallel.pipeline_schedule, parallel.num_model_chunks) == (schedule, num_model_chunks)
    assert parallel.num_stages == 2 * num_model_chunks


def test_the_pipeline_of_a_run() -> None:
    words = "--num-model-chunks 2 --pipeline-schedule optimised --model-chunk-placement v --num-token-slices 3"
    assert parse(words).parallel.pipeline(5) == PipelineShape(4, 5, 3, 2, Placement.V)
    assert parse("").parallel.pipeline() == PipelineShape(2, 1)


EXPERTS = "--num-experts 8 --expert-model-parallel-size 2 --moe-token-dispatcher-type "


@pytest.mark.parametrize(
    ("words", "exchange", "under_ops"),
    [
        ("", "none", True),
        ("--num-experts 8", "none", True),
        (EXPERTS + "allgather --num-model-chunks 2", "allgather", True),
        (EXPERTS + "alltoall", "alltoall", True),
        (EXPERTS + "alltoall --num-model-chunks 2", "alltoall", False),
    ],
)
def test_waits_for_sizes_are_proven_before_a_run(words: str, exchange: str, under_ops: bool) -> None:
    config = parse(f"--num-token-slices 2 {words}")
    schedule = proven_schedule(pipeline_schedule(config, 2), config, 2)
    assert expert_exchange(config) == exchange
    assert check_schedule(schedule, config, [1]) is None
    assert schedule.messages_under_ops == under_ops


def test_the_faster_dispatcher_is_found_for_short_and_for_long_token_slices() -> None:
    small = parse(f"--num-token-slices 2 --vocab-size 1000 {EXPERTS} auto")
    wide = {"hidden_size": 4096, "kv_channels": 1024, "seq_length": 4096, "max_position_embeddings": 4096}
    large = replace(small, model=replace(small.model, **wide))
    assert [expert_exchange(plan_run(config, 4)[0]) for config in (small, large)] == ["allgather", "alltoall"]


def test_replicas_with_cuts_of_their_own_exchange_exact_sizes() -> None:
    words = "--num-token-slices 2 --token-slices balanced-by-documents --reset-attention-mask "
    with pytest.raises(
        ConfigError, match=r"--token-slices balanced-by-documents gives replicas other lengths: use alltoall, or"
    ):
        parse(f"{words} {EXPERTS} allgather")
    found = plan_run(parse(f"{words} {EXPERTS} auto"), 4)[0]
    assert expert_exchange(found) == "alltoall"
    # Ranks of one replica have parts of the same token slice.
    parse(f"{words} {EXPERTS} allgather --ds-sequence-parallel-size 2")


@pytest.mark.parametrize(
    ("rows", "count", "remedy"),
    [
        (16, 4, None),
        (15, 4, "take 3 token slices or fewer"),
        (4, 4, "take one token slice, or larger micro-batches"),
        (3, 1, "take larger micro-batches, or more expert-parallel ranks"),
    ],
)
def test_few_tokens_of_an_expert_are_named(rows: int, count: int, remedy: str | None) -> None:
    strategy = Strategy(micro_batch_size=rows, num_token_slices=count, expert_parallel_size=2)
    line = strategy.few_tokens(parse("--num-experts 8 --moe-router-topk 2").model)
    assert line is None if remedy is None else line is not None and line.endswith(f"fewer than 256: {remedy}")
    assert strategy.few_tokens(parse("").model) is None


@pytest.mark.parametrize(
    ("words", "bounds"),
    [
        ("--num-model-chunks 2", (0, 2, 4, 6, 8)),
        ("--num-model-chunks 2 --decoder-first-pipeline-num-layers 2", (0, 1, 4, 5, 8)),
        ("--num-model-chunks 2 --decoder-last-pipeline-num-layers 2", (0, 3, 4, 7, 8)),
        ("--num-layers 9 --num-model-chunks 2", (0, 3, 5, 7, 9)),
    ],
)
def test_layers_are_dealt_to_the_stages_of_all_model_chunks(words: str, bounds: tuple[int, ...]) -> None:
    """Ends are of a rank, as Megatron's: each of its stages gets a part."""
    config = parse(words)
    stages = config.parallel.stage_bounds() or config.parallel.uniform_stages(config.model.num_layers)
    assert stages.bounds == bounds


def written(folder: Path, shape: PipelineShape) -> Path:
    path = folder / "schedule.csv"
    path.write_text(write_schedule(rank_orders(one_f_one_b, shape)))
    return path


def test_a_schedule_from_a_file(tmp_path: Path) -> None:
    shape = PipelineShape(2, 4, 3)
    config = parse(f"--num-token-slices 3 --pipeline-schedule {written(tmp_path, shape)}")
    schedule = pipeline_schedule(config, 1)
    assert rank_orders(schedule, shape) == rank_orders(one_f_one_b, shape)
    assert warning(config, 4) is None
    with pytest.raises(
        ConfigError, match=r"--pipeline-schedule .*schedule.csv: .* is for .*: change the run, or"
    ) as caught:
        warning(config, 2, 4)
    assert "\n" not in str(caught.value)


def test_a_schedule_that_deadlocks_is_found_before_any_rank_starts(tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text("0F0.0, 0B0.0, 0F1.0, 0B1.0\n1F1.0, 1B1.0, 1F0.0, 1B0.0\n")
    with pytest.raises(ValueError, match=r"schedule.csv: the schedule deadlocks: rank 0 at 0B0.0 waits for"):
        pipeline_schedule(parse(f"--pipeline-schedule {path}"), 1)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_by_name(name: str) -> None:
    config = parse(f"--pipeline-schedule {name} --num-token-slices 3")
    assert pipeline_schedule(config, 1) is SCHEDULES[name]
    assert warning(config, 1, 4) is None


def test_a_schedule_that_one_hardware_queue_may_lock_is_refused() -> None:
    config = parse("--pipeline-schedule interleaved --num-model-chunks 2 --num-token-slices 4 --num-layers 4")
    assert warning(config, 2, queues=1, name="breadth-first") is None
    assert warning(config, 2) is None
    assert warning(config, 2, queues=32) == (
        "--pipeline-schedule interleaved is proven to end only if no two streams of a rank share a hardware queue, "
        "which CUDA does not guarantee: if a step hangs, use 1f1b or breadth-first with at most 16,384 ops"
    )
    with pytest.raises(
        ConfigError, match=r"interleaved: the programs deadlock if .* set CUDA_DEVICE_MAX_CONNECTIONS=32"
    ):
        warning(config, 2, queues=1)


@pytest.mark.parametrize("hardware_queues", [1, 32])
def test_a_schedule_too_large_to_play_on_a_model_of_the_device_needs_a_queue_for_each_stream(
    hardware_queues: int,
) -> None:
    config = parse("--pipeline-schedule 1f1b --num-token-slices 32")
    if hardware_queues == 32:
        line = warning(config, 256, queues=32)
        assert line is not None and "is proven to end only if no two streams" in line
        return
    with pytest.raises(
        ConfigError, match=r"32,768 ops are too many to prove .* 12 streams share 1 hardware queue: set"
    ):
        warning(config, 256, queues=hardware_queues)


MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --num-key-value-heads 2 --seq-length 32 --vocab-size 64"
    " --micro-batch-size 3 --global-batch-size 6 --train-iters 1 --lr 1 --mock-data --bf16"
    " --recompute-granularity stage --token-slices 20,12"
)
PP2, OFFLOAD = "--pipeline-model-parallel-size 2", "--offload-token-slices"


def config_of(flags: str) -> Config:
    return parse_arguments(f"{MODEL} {flags}".split())


@pytest.mark.parametrize(
    ("flags", "inputs", "keys", "windows"),
    [
        (PP2, (0, 64), (2 * 32, 2 * 32), (None, None)),
        (f"{PP2} --stage-partition 0,1,4", (0, 64), (32, 3 * 32), (None, None)),
        # Four ranks for two key heads: two have each.
        (f"{PP2} --tensor-model-parallel-size 2 --sequence-parallel", (0, 32), (32, 32), (None, None)),
        (f"{PP2} --context-parallel-size 4", (0, 16), (32, 32), (None, None)),
        (
            f"{PP2} --vocabulary-stages --untie-embeddings-and-output-weights",
            (0, 64, 64, 64 + 8),
            (2 * 32, 2 * 32, 0, 0),
            (None,) * 4,
        ),
        (f"{PP2} --sliding-window 9", (0, 64), (2 * 32, 2 * 32), (9, 9)),
        (f"{PP2} --num-model-chunks 2 --sliding-window 9 --window-attn-skip-freq 4", (0, 64, 64, 64), (32,) * 4, None),
    ],
)
def test_bytes_of_a_token(
    flags: str, inputs: tuple[int, ...], keys: tuple[int, ...], windows: tuple[int | None, ...] | None
) -> None:
    assert host_copies(config_of(flags), 1) is None
    found = host_copies(config_of(f"{flags} {OFFLOAD}"), 1)
    assert found is not None and found.lengths == (20, 12)
    of_a_row = 3 * 2  # rows, and bytes of an element
    assert found.input_bytes == tuple(of_a_row * each for each in inputs)
    assert found.key_value_bytes == tuple(of_a_row * each for each in keys)
    assert found.windows == (windows or (9, 9, 9, None))
