"""The question of a search: as the flags of a command ask it, and with changes."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megatron_terapipe.search.answer.flags import constraints_of, problem_of
from megatron_terapipe.search.learn.costs import Costs, read_costs
from megatron_terapipe.search.price.cost_model import Pricing
from megatron_terapipe.search.rank.rules import ProgressCallback, no_progress
from megatron_terapipe.search.rank.search import SearchResult, search
from megatron_terapipe.search.rank.space import Choices, SearchProblem, all_choices, check_runnable

EFFORT = 0.1  # effort of a second search


@dataclass(frozen=True, kw_only=True)
class Question:
    """The question of a search."""

    problem: SearchProblem
    constraints: Mapping[str, tuple[Any, ...]]
    """Values that flags allow for dimensions, by name."""
    costs: Costs

    def changed(self, constraints: Mapping[str, tuple[Any, ...]] | None = None, **changes: Any) -> "Question":
        """Return the question with other constraints, or other fields of its problem."""
        problem = replace(self.problem, **changes)
        # A profile was measured with one trainer.
        profile = self.costs.profile if problem.software == self.problem.software else None
        return Question(
            problem=problem,
            constraints=self.constraints if constraints is None else constraints,
            costs=replace(self.costs, workload=problem.workload, software=problem.software, profile=profile),
        )

    @cached_property
    def choices(self) -> Choices:
        """The values of each dimension that are searched."""
        return all_choices(self.problem).constrained(self.constraints)

    @cached_property
    def pricing(self) -> Pricing:
        """Prices on the cluster in the order of its hostfile."""
        return self.costs.pricing_on(self.problem.cluster)

    def search(self, *, effort: float = EFFORT, progress: ProgressCallback = no_progress) -> SearchResult:
        """Return the best strategy, without solvers."""
        return search(
            self.problem, self.choices, self.costs.pricing_on, top=1, effort=effort, refine=False, progress=progress
        )


def question_of(options: argparse.Namespace, num_sequences: int | None = None) -> tuple[Question, tuple[str, ...]]:
    """Return the question that flags ask, its files read, and notes on assumptions about the machine.

    Args:
        num_sequences: in an optimizer step; None = the number of the flag, else 1.
    """
    problem, notes = problem_of(options, num_sequences or options.global_batch_size or 1)
    constraints = constraints_of(options)
    check_runnable(constraints, problem.software)
    costs = read_costs(
        problem.workload,
        problem.cluster,
        problem.precision,
        profile_path=options.profile,
        calibration_path=options.calibrate or options.calibration,
        software=problem.software,
    )
    question = Question(problem=costs.problem_with(problem, constraints), constraints=constraints, costs=costs)
    return question, notes
