"""Token slices and schedules that are found: better than those that are written down, and the same every time."""

from pathlib import Path

import pytest

from deepspeed_ext.plan import found_schedule
from deepspeed_ext.plan.found_schedule import FoundSchedule
from deepspeed_ext.plan.programs.lowering import lower
from deepspeed_ext.plan.schedules import SCHEDULES, memory_of_1f1b, rank_orders
from deepspeed_ext.plan.simulate import simulate
from deepspeed_ext.plan.slicing import TokenSlices
from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.config import Config
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.planning import (
    check_schedule,
    cost_model_of,
    pipeline_schedule,
    proven_schedule,
    with_found_token_slices,
)
from megatron_terapipe.strategy import Strategy

# Large enough that the ops of a token slice take longer than their launches.
REQUIRED = (
    "--num-layers 8 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --vocab-size 257 --bf16 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 10 --lr 1e-3 --data-path corpus "
    "--pipeline-model-parallel-size 4 "
)
NUM_MICRO_BATCHES = 4


def parse(words: str = "") -> Config:
    return parse_arguments((REQUIRED + words).split())


def found_for(words: str) -> Config:
    return with_found_token_slices(parse(words), 1)


def makespan(config: Config) -> float:
    shape, strategy = config.parallel.pipeline(NUM_MICRO_BATCHES), Strategy.of_config(config, 1)
    costs = cost_model_of(config, 4).pipeline_costs(strategy)
    return simulate(rank_orders(pipeline_schedule(config, 1), shape), shape, costs).makespan


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero-bubble"])
def test_found_token_slices_are_better_than_equal_and_balanced_ones(name: str) -> None:
    words = f"--pipeline-schedule {name} --num-token-slices 6 --token-slices"
    found = found_for(f"{words} auto")
    assert len(found.token_slices()) == 6
    assert all(length % 16 == 0 for length in found.token_slices().lengths)
    assert makespan(found) < makespan(parse(f"--pipeline-schedule {name} --num-token-slices 6"))
    # Balanced lengths are multiples of 16 tokens, those that are searched of 32.
    assert makespan(found) < 1.001 * makespan(parse(f"{words} balanced"))


def test_without_a_number_the_best_one_is_found() -> None:
    best = found_for("--token-slices auto")
    count = best.parallel.num_token_slices
    assert 1 < count < 128
    for other in (1, 2, 2 * count):
        given = found_for(f"--token-slices auto --num-token-slices {other}")
        assert makespan(best) <= makespan(given)


def test_the_answer_is_a_list_and_always_the_same() -> None:
    words = "--token-slices auto --num-model-chunks 2 --num-token-slices 5"
    first, second = (found_for(words) for _ in range(2))
    assert first == second
    assert TokenSlices.parse(first.parallel.token_slices).covering(4096) == first.token_slices()
    assert with_found_token_slices(first, 1) == first


def test_ranks_that_share_tokens_get_multiples() -> None:
    words = "--token-slices auto --num-token-slices 3 --tensor-model-parallel-size 4 --sequence-parallel"
    config = found_for(f"{words} --seq-length 28 --max-position-embeddings 28")
    assert sum(config.token_slices().lengths) == 28
    assert all(length % 4 == 0 for length in config.token_slices().lengths)


def test_too_many_token_slices_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--token-slices auto: 9 token slices of 8 tokens, each a multiple of 1: "):
        found_for("--token-slices auto --num-token-slices 9 --seq-length 8")


def test_a_file_is_for_one_number_of_token_slices(tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text("0F0 0B0")
    with pytest.raises(ConfigError, match=r"--token-slices auto does not go with --pipeline-schedule .*: give their"):
        parse(f"--token-slices auto --pipeline-schedule {path}")


@pytest.fixture
def little_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what holds of any search, however long."""
    monkeypatch.setattr(found_schedule, "EFFORT", 0.05)


@pytest.mark.usefixtures("little_effort")
def test_the_placement_of_model_chunks_is_found_with_the_token_slices() -> None:
    # With few long ops a V is idle for less time: its first rank has the loss, and turns at once.
    words = "--num-model-chunks 2 --pipeline-schedule optimised --token-slices auto --num-token-slices 1"
    words = f"{words} --global-batch-size 2"
    looped, v, found = (found_for(f"{words} --model-chunk-placement {each}") for each in ("looped", "v", "auto"))
    assert found == v
    assert makespan(v) < makespan(looped)


@pytest.fixture(scope="module")
def optimised() -> tuple[Config, FoundSchedule]:
    # So long a sequence that attention makes the token slices uneven, for which no schedule by name is made.
    model_chunks = "--num-model-chunks 2 --model-chunk-placement v"
    config = parse(f"--pipeline-schedule optimised --num-token-slices 4 {model_chunks}")
    return config, pipeline_schedule(config, 1)


def test_a_found_schedule_is_better_than_those_by_name_in_the_memory_of_1f1b(
    optimised: tuple[Config, FoundSchedule],
) -> None:
    config, schedule = optimised
    shape = config.parallel.pipeline(NUM_MICRO_BATCHES)
    check_schedule(proven_schedule(schedule, config, 1), config, [NUM_MICRO_BATCHES])
    found = makespan(config)
    for others in ("1f1b", "zero-bubble", "interleaved --num-model-chunks 2"):
        assert found < makespan(parse(f"--num-token-slices 4 --pipeline-schedule {others}"))
    assert max(schedule.found(shape).peak_activation) <= memory_of_1f1b(shape, config.token_slices()) + 1e-9


@pytest.mark.usefixtures("little_effort")
def test_a_found_schedule_is_the_same_on_every_rank_and_found_once(optimised: tuple[Config, FoundSchedule]) -> None:
    config, schedule = optimised
    shape = config.parallel.pipeline(1)
    elsewhere = pipeline_schedule(config, 1)
    assert rank_orders(schedule, shape) == rank_orders(elsewhere, shape)
    assert schedule.found(shape) is schedule.found(shape)


@pytest.mark.usefixtures("little_effort")
def test_a_memory_limit_is_kept() -> None:
    config = parse("--pipeline-schedule optimised --num-token-slices 4 --schedule-memory-limit 1.25")
    schedule = pipeline_schedule(config, 1)
    assert max(schedule.found(config.parallel.pipeline(NUM_MICRO_BATCHES)).peak_activation) <= 1.25


@pytest.mark.parametrize(
    ("lengths", "num_micro_batches", "expected"), [((4, 4, 4, 4), 8, 1.75), ((8, 4, 2, 2), 8, 1.875), ((4, 4), 1, 1.0)]
)
def test_the_memory_of_1f1b(lengths: tuple[int, ...], num_micro_batches: int, expected: float) -> None:
    config = parse(f"--num-token-slices {len(lengths)}")
    shape = config.parallel.pipeline(num_micro_batches)
    assert memory_of_1f1b(shape, TokenSlices(lengths)) == pytest.approx(expected)
    programs = lower(SCHEDULES["1f1b"], shape)
    # As many token slices as 1f1b really keeps on the first rank.
    assert programs[0].num_buffers == min(4 - 1 + len(lengths), num_micro_batches * len(lengths))


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_stages_are_found_with_the_token_slices(schedule: str) -> None:
    # The output layer of 256,000 words weighs as much as five of these layers.
    words = (
        f"--vocab-size 256000 --num-layers 32 --pipeline-schedule {schedule} --num-token-slices 4 --token-slices auto"
    )
    found = found_for(f"{words} --stage-partition auto")
    bounds = found.parallel.stage_bounds()
    assert bounds is not None and bounds.num_layers == 32
    assert len(bounds.layers(3)) < len(bounds.layers(0))
    assert makespan(found) < 0.9 * makespan(found_for(words))
