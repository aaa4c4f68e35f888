"""The legal strategies of a space, layout by layout, and how many each rule rejects."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from deepspeed_ext.plan.schedules import OPTIMISED
from megatron_terapipe.dimensions import Tried
from megatron_terapipe.search.space.choices import Choices
from megatron_terapipe.search.space.problem import SearchProblem
from megatron_terapipe.search.space.rules import DUPLICATE_RULES, TRAINER_RULES, DuplicateRule, TrainerRule
from megatron_terapipe.search.space.strategy_grid import AXES, StrategyGrid
from megatron_terapipe.strategy import DIMENSIONS, Strategy


@dataclass
class SearchCounts:
    """Counts of the strategies of a search: how many there are, and how many each step rejects or prices."""

    total: int = 0
    """Strategies of the whole space."""
    rejected: Counter[str] = field(default_factory=Counter)
    """How many each rule was the first to reject, by its name."""
    priced: int = 0
    """Strategies that kept all rules and were priced in closed form."""
    simulated: int = 0
    """Strategies that were priced on their schedule."""

    def expect(self, names: Iterable[str]) -> None:
        """Fix the order in which rules are listed."""
        for name in names:
            self.rejected.setdefault(name, 0)

    def reject(self, name: str, number: int) -> None:
        """Count strategies that a rule rejects."""
        if number:
            self.rejected[name] += number

    @property
    def num_rejected(self) -> int:
        """Number of strategies that were rejected."""
        return sum(self.rejected.values())

    def lines(self) -> list[tuple[str, int]]:
        """Return the lines to print: a label and a count each."""
        return [
            ("strategies of the space", self.total),
            *((f"  rejected by the rule: {name}", -number) for name, number in self.rejected.items() if number),
            ("feasible", self.total - self.num_rejected),
            ("priced on their schedule", self.simulated),
        ]


RULES: tuple[TrainerRule | DuplicateRule, ...] = (*TRAINER_RULES, *DUPLICATE_RULES)

USES_DEVICES = "parallel sizes multiply to the devices"


@dataclass(frozen=True)
class LegalGrid:
    """A grid of strategies, and which of them keep all rules."""

    grid: StrategyGrid
    """The grid; values that no strategy can have are gone from its axes."""
    legal: NDArray[np.bool_]
    """[grid] whether a strategy keeps the rules."""


def layouts(choices: Choices, num_devices: int) -> list[dict[str, int]]:
    """Return the values of the dimensions that are on no axis of a grid, by name, in all combinations.

    Args:
        num_devices: devices that the ranks must use, all of them.

    Returns:
        One dictionary for each combination; its data-parallel size is 0 where no size uses all devices.
    """
    searched = [each for each in DIMENSIONS if each.tried is not None and not each.axis]
    (rest,) = [each.name for each in searched if each.tried is Tried.REST_OF_DEVICES]
    others = [each for each in searched if each.name != rest]
    wanted = choices.values[rest]
    found = []
    for values in itertools.product(*(choices[each.name] for each in others)):
        size, left_over = divmod(num_devices, prod(v for each, v in zip(others, values, strict=True) if each.ranks))
        size = 0 if left_over else size
        if wanted is None or size in wanted:
            found.append({rest: size, **{each.name: v for each, v in zip(others, values, strict=True)}})
    return found


def legal_grids(problem: SearchProblem, choices: Choices, counts: SearchCounts) -> Iterator[LegalGrid]:
    """Yield the strategies of the space that keep all rules, a grid for each layout: [axes of `StrategyGrid`]."""
    counts.expect((USES_DEVICES, *(rule.name for rule in RULES)))
    for sizes in layouts(choices, problem.cluster.num_devices):
        counts.total += choices.per_layout
        if not sizes["data_parallel_size"]:
            counts.reject(USES_DEVICES, choices.per_layout)
            continue
        found = _legal(StrategyGrid.of_choices(choices, sizes, problem.global_batch_size), problem, counts)
        if found is not None:
            yield found


def _legal(grid: StrategyGrid, problem: SearchProblem, counts: SearchCounts) -> LegalGrid | None:
    """Return what the rules leave of a grid; None if nothing."""
    legal: NDArray[np.bool_] | None = None
    left = grid.size
    for rule in RULES:
        holds = rule.holds(grid, problem)
        axes = [axis for axis, length in enumerate(holds.shape) if length > 1]
        if legal is None and len(axes) <= 1:
            # About one axis at most: drop its values, so that what follows is smaller.
            axis = AXES[axes[0]] if axes else AXES[0]
            kept = holds.ravel() if axes else np.full(grid.shape[0], holds.all())
            smaller = grid.keep(axis, kept)
            counts.reject(rule.name, grid.size - smaller.size)
            grid = smaller
            if not grid.size:
                return None
            continue
        before, left = (True, grid.size) if legal is None else (legal, left)
        legal = np.broadcast_to(before & holds, grid.shape)
        counts.reject(rule.name, left - (left := int(np.count_nonzero(legal))))
    if legal is None:
        legal = np.ones(grid.shape, dtype=bool)
    return LegalGrid(grid, legal) if legal.any() else None


def broken_rule(strategy: Strategy, problem: SearchProblem) -> str | None:
    """Return why a strategy cannot be run; None if it can.

    Args:
        problem: model and cluster; the batch is the strategy's own.
    """
    if strategy.schedule == OPTIMISED:
        if not problem.software.can_run("schedule", OPTIMISED):
            return f"{problem.software.name} cannot run schedule {OPTIMISED}"
        # An order is found for any pipeline that a schedule by name takes.
        by_name = "interleaved" if strategy.num_model_chunks > 1 else "1f1b"
        strategy = replace(strategy, schedule=by_name, vocabulary_stages=False)
    elif strategy.vocabulary_stages:
        return f"vocabulary stages are priced with an order that is found for them alone: write schedule {OPTIMISED!r}"
    grid = StrategyGrid.of_strategy(strategy)
    return next((reason for rule in TRAINER_RULES if (reason := rule.reason(grid, problem)) is not None), None)
