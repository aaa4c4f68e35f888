"""The trainer accepts legal strategies, and refuses those that rules reject."""

from dataclasses import replace

import numpy as np
import pytest

from deepspeed_ext.plan.schedules import SCHEDULES
from megatron_terapipe.config.training import PrecisionConfig
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.planning import check_trainable, host_copies
from megatron_terapipe.search.machine.trainers import SOFTWARE
from megatron_terapipe.search.price.stages import LayerCounter, pipeline_shape
from megatron_terapipe.search.rank.rules import TRAINER_RULES, SearchCounts, broken_rule, legal_grids
from megatron_terapipe.search.rank.space import AXES, StrategyGrid, all_choices, check_runnable
from megatron_terapipe.strategy import Strategy
from tests.search.problems import drawn, legal_strategies, small_cluster, small_problem


def trains(strategy: Strategy, problem, **sections) -> bool:
    try:
        check_trainable(strategy, problem.workload.config, **sections)
    except ConfigError:
        return False
    return True


EXPERTS = {"num_experts": 12, "moe_ffn_hidden_size": 64, "moe_shared_expert_intermediate_size": 48}
LONG = {
    "sequence_parallel_size": (2, 3, 4, 8),
    "tensor_parallel_size": (1, 2, 4),
    "recompute": ("selective", "stage"),
    "offload": (False, True),
    "schedule": ("1f1b", "zero-bubble", "breadth-first"),
    "num_token_slices": (1, 2, 3, 5),
    "num_model_chunks": (1, 2),
}


@pytest.mark.parametrize(
    ("devices", "model", "few", "number", "seed"),
    [
        # The trainer plays the whole schedule: few ops, so that many strategies can be checked.
        *((4, {}, {"num_token_slices": (1, 2, 3, 5)}, 70, seed) for seed in range(4)),
        *((8, {"num_key_value_heads": 2, "seq_length": 480}, LONG, 25, seed) for seed in range(2)),
        *((4, EXPERTS, {"num_token_slices": (1, 3), "num_model_chunks": (1, 2)}, 25, seed) for seed in range(2)),
    ],
)
def test_trainer_accepts_legal_strategies(devices: int, model: dict, few: dict, number: int, seed: int) -> None:
    cluster = small_cluster(num_nodes=3, num_devices=devices)
    problem = small_problem(cluster, global_batch_size=12, num_layers=7 + seed, **model)
    choices = all_choices(problem).constrained(few)
    found = list(drawn(problem, number, seed, choices))
    for strategy in found:
        assert broken_rule(strategy, problem) is None
        check_trainable(strategy, problem.workload.config)
    if model == EXPERTS:
        assert choices["expert_parallel_size"] == (1, 2, 3, 4, 6, 12)
        assert len({strategy.expert_parallel_size for strategy in found}) > 3


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
    "bounds with an empty stage": dict(pipeline_parallel_size=3, stage_partition=(0, 3, 3, 6)),
    "zero": dict(zero_stage=2),
    "weights that are divided": dict(zero_stage=3),
    "shards": dict(data_parallel_size=4, zero_shard_size=2),
    "recompute": dict(recompute="blocks"),
    "schedule": dict(schedule="dualpipe"),
}
OF_EXPERTS = {
    "ranks of a stage": dict(data_parallel_size=4, pipeline_parallel_size=2, expert_parallel_size=6),
    "experts": dict(data_parallel_size=8, expert_parallel_size=8),
    "tokens of tensor-parallel ranks": dict(tensor_parallel_size=2),
}


@pytest.mark.parametrize(
    ("fields", "experts", "refused"),
    [
        *((fields, {}, True) for fields in REFUSED.values()),
        *((fields, EXPERTS, True) for fields in OF_EXPERTS.values()),
        *((fields, {}, "expert_parallel_size" in fields) for fields in OF_EXPERTS.values()),
    ],
)
def test_trainer_refuses_strategies_that_rules_reject(fields: dict, experts: dict, refused: bool) -> None:
    problem = small_problem(small_cluster(num_nodes=16), **experts)
    strategy = Strategy(global_batch_size=8, **fields)
    reason = broken_rule(strategy, problem)
    assert (reason is not None and len(reason) > 20) == refused
    assert trains(strategy, problem) != refused


def test_the_embedding_and_the_output_layer_may_have_stages_of_their_own() -> None:
    problem = small_problem(small_cluster(num_nodes=16))
    num_layers = problem.workload.num_dealt_layers
    bounds = (0, *range(num_layers + 1), num_layers)
    strategy = Strategy(pipeline_parallel_size=num_layers + 2, stage_partition=bounds, global_batch_size=8)
    assert broken_rule(strategy, problem) is None and trains(strategy, problem)
    counts = LayerCounter(problem.workload).count(problem.partition(bounds, num_layers + 2), num_layers + 2, 1)
    assert counts.per_stage.sum(axis=1).tolist() == [1] * (num_layers + 1) + [2]


def test_the_loss_scale_of_fp16_and_ranks_that_fit_the_devices() -> None:
    problem = replace(small_problem(), precision="fp16")
    strategy = Strategy(data_parallel_size=2, zero_stage=0)
    assert "fp16" in str(broken_rule(strategy, problem))
    assert not trains(strategy, problem, precision=PrecisionConfig(fp16=True))
    assert broken_rule(replace(strategy, zero_stage=1), problem) is None
    assert "8 ranks, but the cluster has 4 devices" in str(broken_rule(Strategy(data_parallel_size=8), problem))


def test_no_two_strategies_run_the_same_ops_in_the_same_order() -> None:
    problem = small_problem(small_cluster(num_nodes=1, num_devices=4), global_batch_size=2, num_layers=4)
    plain = {"recompute": ("none",), "num_token_slices": (1, 2), "stage_partition": ("uniform",), "zero_stage": (1,)}
    runs: dict[object, Strategy] = {}
    for strategy in legal_strategies(problem, all_choices(problem).constrained(plain)):
        shape = pipeline_shape(strategy)
        orders = tuple(tuple(SCHEDULES[strategy.schedule](shape, rank)) for rank in range(shape.num_ranks))
        run = orders, replace(strategy, schedule="1f1b")
        assert run not in runs, (strategy, runs[run])
        runs[run] = strategy
    assert {strategy.schedule for strategy in runs.values()} == set(SCHEDULES) - {"breadth-first"}
    # The only value of a flag stays, though another schedule equals it.
    asked = all_choices(problem).constrained({**plain, "schedule": ("gpipe",), "micro_batch_size": (2,)})
    assert any(legal.legal.any() for legal in legal_grids(problem, asked, SearchCounts()))


def test_host_copies_need_known_stages() -> None:
    problem = small_problem()
    strategy = Strategy(pipeline_parallel_size=2, recompute="stage", offload=True, global_batch_size=8)
    assert broken_rule(strategy, problem) is None
    unknown = replace(strategy, stage_partition="parameters")
    assert broken_rule(unknown, problem) is not None
    with pytest.raises(ConfigError, match="when the model is built"):
        host_copies(unknown.config(problem.workload.config), 1)


def test_every_strategy_is_legal_or_counted() -> None:
    problem = small_problem()
    counts = SearchCounts()
    legal = sum(int(found.legal.sum()) for found in legal_grids(problem, all_choices(problem), counts))
    assert legal + counts.num_rejected == counts.total
    assert dict(counts.lines())["feasible"] == legal
    assert all(number > 0 for name, number in counts.lines() if name == "strategies of the space")


def test_rules_of_a_grid_equal_rules_of_each_strategy() -> None:
    problem = small_problem(num_layers=5, seq_length=96)
    few = {"micro_batch_size": (1, 3), "num_token_slices": (1, 64, 96), "num_model_chunks": (1, 2)}
    choices = all_choices(problem).constrained({**few, "stage_partition": ("uniform",)})
    names = [f"{axis}_parallel_size" for axis in ("data", "sequence", "tensor", "pipeline")]
    for ranks in ((1, 1, 2, 2), (2, 1, 2, 1), (1, 1, 1, 4)):
        sizes = dict(zip(names, ranks, strict=True)) | {"vocabulary_stages": False}
        sizes |= {"key_value_gradients": "fp32", "latent_kept": "expanded"}
        grid = StrategyGrid.of_choices(choices, sizes, problem.global_batch_size)
        together = np.ones(grid.shape, dtype=bool)
        for rule in TRAINER_RULES:
            together = together & rule.holds(grid, problem)
        assert together.any() and not together.all()
        for place in np.ndindex(*grid.shape):
            one = grid
            for axis, index in zip(AXES, place, strict=True):
                one = one.keep(axis, np.arange(len(getattr(grid, axis))) == index)
            assert together[place] == all(rule.reason(one, problem) is None for rule in TRAINER_RULES), place


def test_constrained_dimensions_have_no_other_values() -> None:
    problem = small_problem()
    choices = all_choices(problem).constrained(
        {"tensor_parallel_size": (2,), "schedule": ("gpipe",), "token_slices": (300, 212), "zero_stage": (0,)}
    )
    found = list(legal_strategies(problem, choices))
    assert found
    for strategy in found:
        assert strategy.tensor_parallel_size == 2 and strategy.schedule == "gpipe"
        assert strategy.token_slices == (300, 212) and strategy.zero_stage == 0
        assert broken_rule(strategy, problem) is None


def test_what_a_trainer_cannot_run_is_not_searched_and_its_flags_are_refused() -> None:
    choices = all_choices(replace(small_problem(), software=SOFTWARE["megatron-core"]))
    assert choices["num_token_slices"] == (1,)
    assert set(choices["schedule"]) == {"gpipe", "1f1b", "interleaved"} < set(all_choices(small_problem())["schedule"])
    fsdp = SOFTWARE["fsdp"]
    check_runnable({"pipeline_parallel_size": (1,), "micro_batch_size": (2, 4)}, fsdp)
    with pytest.raises(ConfigError, match="--pipeline-parallel-size 2 does not run in fsdp: write 1"):
        check_runnable({"pipeline_parallel_size": (1, 2)}, fsdp)


def test_a_strategy_that_it_cannot_run_says_why() -> None:
    asked = Strategy(data_parallel_size=2, pipeline_parallel_size=2, schedule="zero-bubble", global_batch_size=8)
    for name, reason in (
        ("terapipe", None),
        ("deepspeed", "deepspeed cannot run schedule zero-bubble, but 1f1b"),
        ("fsdp", "fsdp cannot run pipeline_parallel_size 2, but 1"),
    ):
        assert broken_rule(asked, replace(small_problem(), software=SOFTWARE[name])) == reason
