"""The walk through a space: everything is legal, or counted with its reason."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.space.choices import all_choices
from megatron_terapipe.search.space.legal_grids import RULES, Funnel, broken_rule, legal_grids
from megatron_terapipe.search.space.strategy_grid import AXES, StrategyGrid
from tests.search.problems import small_cluster, small_problem


def test_every_strategy_is_legal_or_counted() -> None:
    problem = small_problem()
    funnel = Funnel()
    legal = sum(int(found.legal.sum()) for found in legal_grids(problem, all_choices(problem), funnel))
    assert legal + funnel.num_rejected == funnel.total
    assert dict(funnel.lines())["feasible"] == legal
    assert all(number > 0 for name, number in funnel.lines() if name == "strategies of the space")


def test_a_grid_is_judged_as_its_strategies_are_one_by_one() -> None:
    """The rules see grids; each strategy alone, as a grid of one, gets the same verdict of the trainer's rules."""
    problem = small_problem(num_layers=5, seq_length=96)
    choices = replace(
        all_choices(problem),
        stage_partition=("uniform",),
        micro_batch_size=(1, 3),
        num_token_slices=(1, 64, 96),
        num_model_chunks=(1, 2),
    )
    for sizes in ((1, 2, 2), (2, 2, 1), (1, 1, 4)):
        grid = StrategyGrid.of_choices(choices, sizes, problem.global_batch_size)
        trainer_rules = [rule for rule in RULES if rule.name.startswith(TRAINERS)]
        together = np.ones(grid.shape, dtype=bool)
        for rule in trainer_rules:
            together = together & rule.holds(grid, problem)
        for place in np.ndindex(*grid.shape):
            one = StrategyGrid(
                **{name: getattr(grid, name) for name in SIZES},
                **{axis: (getattr(grid, axis)[index],) for axis, index in zip(AXES, place, strict=True)},
            )
            assert together[place] == all(rule.holds(one, problem).all() for rule in trainer_rules), place


SIZES = ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size", "global_batch_size")
TRAINERS = ("a layer for", "the schedule", "the batch", "tokens for", "layers let")


def test_pins_leave_their_values_alone() -> None:
    problem = small_problem()
    choices = all_choices(problem).pinned(
        {"tensor_parallel_size": (2,), "schedule": ("gpipe",), "token_slices": (300, 212), "zero_stage": (0,)}
    )
    found = list(legal_grids(problem, choices, Funnel()))
    assert found
    for legal in found:
        for flat in np.flatnonzero(legal.legal):
            place = [int(each) for each in np.unravel_index(flat, legal.grid.shape)]
            strategy = legal.grid.strategy(place, problem)
            assert strategy.tensor_parallel_size == 2 and strategy.schedule == "gpipe"
            assert strategy.token_slices == (300, 212) and strategy.zero_stage == 0
            assert broken_rule(strategy, problem) is None


def test_pins_that_contradict() -> None:
    with pytest.raises(ConfigError, match="--num-token-slices 4 contradicts --token-slices, which lists 2"):
        all_choices(small_problem()).pinned({"token_slices": (256, 256), "num_token_slices": (4,)})


def test_no_strategy_is_there_twice() -> None:
    problem = small_problem(small_cluster(num_nodes=1))
    seen = set()
    for legal in legal_grids(
        problem, all_choices(problem).pinned({"stage_partition": ("uniform", "parameters")}), Funnel()
    ):
        for flat in np.flatnonzero(legal.legal):
            place = [int(each) for each in np.unravel_index(flat, legal.grid.shape)]
            strategy = legal.grid.strategy(place, problem)
            assert strategy not in seen
            seen.add(strategy)
    assert len(seen) > 500


def test_all_devices_are_used() -> None:
    problem = small_problem(small_cluster(num_nodes=3))
    for legal in legal_grids(problem, all_choices(problem), Funnel()):
        assert legal.grid.world_size == 6
