"""What the space calls legal, the trainer takes; what it rejects, the trainer refuses."""

from dataclasses import replace

import numpy as np
import pytest

from deepspeed_ext.plan.schedules import SCHEDULES
from megatron_terapipe.config.training import PrecisionConfig
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.planning import check_trainable, host_copies
from megatron_terapipe.search.price.stages import pipeline_shape
from megatron_terapipe.search.rank.rules import DUPLICATES, TRAINER_RULES, SearchCounts, broken_rule, legal_grids
from megatron_terapipe.search.rank.space import all_choices
from megatron_terapipe.strategy import Strategy
from tests.search.problems import drawn, small_cluster, small_problem


def trains(strategy: Strategy, problem, **sections) -> bool:
    try:
        check_trainable(strategy, problem.workload.config, **sections)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("seed", range(4))
def test_the_trainer_takes_what_is_legal(seed: int) -> None:
    problem = small_problem(small_cluster(num_nodes=3, num_devices=4), global_batch_size=12, num_layers=7 + seed)
    # The trainer plays the whole schedule: few ops, so that many strategies can be held against it.
    choices = all_choices(problem).constrained({"num_token_slices": (1, 2, 3, 5)})
    for strategy in drawn(problem, 70, seed, choices):
        assert broken_rule(strategy, problem) is None
        check_trainable(strategy, problem.workload.config)


@pytest.mark.parametrize("seed", range(2))
def test_the_trainer_takes_what_is_there_for_long_sequences(seed: int) -> None:
    cluster = small_cluster(num_nodes=3, num_devices=8)
    problem = small_problem(cluster, global_batch_size=12, num_layers=7 + seed, num_key_value_heads=2, seq_length=480)
    long = {
        "sequence_parallel_size": (2, 3, 4, 8),
        "tensor_parallel_size": (1, 2, 4),
        "recompute": ("selective", "stage"),
        "offload": (False, True),
        "schedule": ("1f1b", "zero-bubble", "breadth-first"),
        "num_token_slices": (1, 2, 3, 5),
        "num_model_chunks": (1, 2),
    }
    for strategy in drawn(problem, 25, seed, all_choices(problem).constrained(long)):
        assert broken_rule(strategy, problem) is None
        check_trainable(strategy, problem.workload.config)


REFUSED = {
    "heads": dict(tensor_parallel_size=16),
    "heads of a part": dict(tensor_parallel_size=2, sequence_parallel_size=8),
    "parts of token slices": dict(num_token_slices=2, token_slices=(255, 257), sequence_parallel_size=2),
    "offload": dict(offload=True),
    "layers": dict(pipeline_parallel_size=8),
    "model chunks": dict(num_model_chunks=2),
    "more model chunks than layers": dict(num_model_chunks=4, pipeline_parallel_size=2, schedule="interleaved"),
    "token slices": dict(num_token_slices=1024),
    "token slices that do not cover": dict(num_token_slices=2, token_slices=(256, 255)),
    "sequence parallel": dict(
        num_token_slices=2, token_slices=(255, 257), sequence_parallel=True, tensor_parallel_size=2
    ),
    "bounds": dict(pipeline_parallel_size=2, stage_partition=(0, 4, 7)),
    "number of bounds": dict(pipeline_parallel_size=2, stage_partition=(0, 2, 4, 6)),
    "zero": dict(zero_stage=2),
    "recompute": dict(recompute="blocks"),
    "schedule": dict(schedule="dualpipe"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_trainer_refuses_what_a_rule_rejects(name: str) -> None:
    problem = small_problem(small_cluster(num_nodes=16))
    strategy = Strategy(global_batch_size=8, **REFUSED[name])
    reason = broken_rule(strategy, problem)
    assert reason is not None and len(reason) > 20
    assert not trains(strategy, problem)


def test_the_loss_scale_of_fp16() -> None:
    problem = replace(small_problem(), precision="fp16")
    strategy = Strategy(data_parallel_size=2, zero_stage=0)
    assert "fp16" in str(broken_rule(strategy, problem))
    assert not trains(strategy, problem, precision=PrecisionConfig(fp16=True))
    assert broken_rule(replace(strategy, zero_stage=1), problem) is None


def test_ranks_fit_the_devices() -> None:
    assert "8 ranks, but the cluster has 4 devices" in str(broken_rule(Strategy(data_parallel_size=8), small_problem()))


def test_rules_have_names_of_their_own() -> None:
    names = [rule.name for rule in (*TRAINER_RULES, *DUPLICATES)]
    assert len(set(names)) == len(names)


def test_no_two_strategies_run_the_same_ops_in_the_same_order() -> None:
    problem = small_problem(small_cluster(num_nodes=1, num_devices=4), global_batch_size=2, num_layers=4)
    plain = {"recompute": ("none",), "num_token_slices": (1, 2), "stage_partition": ("uniform",), "zero_stage": (1,)}
    runs: dict[object, Strategy] = {}
    for legal in legal_grids(problem, all_choices(problem).constrained(plain), SearchCounts()):
        for flat in np.flatnonzero(legal.legal).tolist():
            strategy = legal.grid.strategy([int(each) for each in np.unravel_index(flat, legal.grid.shape)], problem)
            shape = pipeline_shape(strategy)
            orders = tuple(tuple(SCHEDULES[strategy.schedule](shape, rank)) for rank in range(shape.num_ranks))
            run = orders, replace(strategy, schedule="1f1b")
            assert run not in runs, (strategy, runs[run])
            runs[run] = strategy
    assert {strategy.schedule for strategy in runs.values()} == set(SCHEDULES) - {"breadth-first"}
    # What a flag asks for stays, though another schedule would do the same.
    asked = all_choices(problem).constrained({**plain, "schedule": ("gpipe",), "micro_batch_size": (2,)})
    assert any(legal.legal.any() for legal in legal_grids(problem, asked, SearchCounts()))


def test_copies_of_stages_that_nobody_knows_yet_cannot_be_planned() -> None:
    problem = small_problem()
    strategy = Strategy(pipeline_parallel_size=2, recompute="stage", offload=True, global_batch_size=8)
    assert broken_rule(strategy, problem) is None
    unknown = replace(strategy, stage_partition="parameters")
    assert broken_rule(unknown, problem) is not None
    with pytest.raises(ConfigError, match="when the model is built"):
        host_copies(unknown.config(problem.workload.config), 1)
