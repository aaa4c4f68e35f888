"""The walk through a space: everything is legal, or counted with its reason."""

import numpy as np
import pytest

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.rank.rules import TRAINER_RULES, SearchCounts, broken_rule, legal_grids
from megatron_terapipe.search.rank.space import all_choices
from megatron_terapipe.search.rank.strategy_grid import AXES, StrategyGrid
from tests.search.problems import small_cluster, small_problem


def test_every_strategy_is_legal_or_counted() -> None:
    problem = small_problem()
    counts = SearchCounts()
    legal = sum(int(found.legal.sum()) for found in legal_grids(problem, all_choices(problem), counts))
    assert legal + counts.num_rejected == counts.total
    assert dict(counts.lines())["feasible"] == legal
    assert all(number > 0 for name, number in counts.lines() if name == "strategies of the space")


def test_rules_say_the_same_of_a_grid_and_of_its_strategies() -> None:
    """Rules say the same of a grid and of each of its strategies alone, as a grid of one."""
    problem = small_problem(num_layers=5, seq_length=96)
    choices = all_choices(problem).constrained(
        {
            "stage_partition": ("uniform",),
            "micro_batch_size": (1, 3),
            "num_token_slices": (1, 64, 96),
            "num_model_chunks": (1, 2),
        }
    )
    names = [f"{axis}_parallel_size" for axis in ("data", "sequence", "tensor", "pipeline")]
    for ranks in ((1, 1, 2, 2), (2, 1, 2, 1), (1, 1, 1, 4)):
        sizes = dict(zip(names, ranks, strict=True)) | {"vocabulary_stages": False, "key_value_gradients": "fp32"}
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
    found = list(legal_grids(problem, choices, SearchCounts()))
    assert found
    for legal in found:
        for flat in np.flatnonzero(legal.legal):
            place = [int(each) for each in np.unravel_index(flat, legal.grid.shape)]
            strategy = legal.grid.strategy(place, problem)
            assert strategy.tensor_parallel_size == 2 and strategy.schedule == "gpipe"
            assert strategy.token_slices == (300, 212) and strategy.zero_stage == 0
            assert broken_rule(strategy, problem) is None


def test_constraints_that_contradict() -> None:
    with pytest.raises(ConfigError, match="--num-token-slices 4 contradicts --token-slices, which lists 2"):
        all_choices(small_problem()).constrained({"token_slices": (256, 256), "num_token_slices": (4,)})


def test_no_strategy_is_there_twice() -> None:
    problem = small_problem(small_cluster(num_nodes=1))
    seen = set()
    for legal in legal_grids(
        problem, all_choices(problem).constrained({"stage_partition": ("uniform", "parameters")}), SearchCounts()
    ):
        for flat in np.flatnonzero(legal.legal):
            place = [int(each) for each in np.unravel_index(flat, legal.grid.shape)]
            strategy = legal.grid.strategy(place, problem)
            assert strategy not in seen
            seen.add(strategy)
    assert len(seen) > 500


def test_all_devices_are_used() -> None:
    problem = small_problem(small_cluster(num_nodes=3))
    for legal in legal_grids(problem, all_choices(problem), SearchCounts()):
        assert legal.grid.world_size == 6
