"""A schedule that is found for the costs of a pipeline when its first op is asked for."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from deepspeed_ext.plan.closed_forms import memory_of_1f1b
from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.ops import Op, PipelineShape
from deepspeed_ext.plan.slicing import TokenSlices

if TYPE_CHECKING:  # The solvers compile their kernels, and not every run needs one.
    from deepspeed_ext.plan.optimise import OptimisedSchedule

EFFORT = 0.2
"""Effort of the search before a run starts: some seconds of one core, on every rank at once."""


class FoundSchedule:
    """A schedule that is found for each shape of the pipeline when it is first asked for. Every rank finds the same.

    Args:
        costs: costs of the ops of a shape, the same on all ranks.
        token_slices: lengths of the token slices, which memory depends on.
        memory_limit: activations of one micro-batch that a rank may hold; None for as many as `1f1b` does.
    """

    def __init__(
        self,
        costs: Callable[[PipelineShape], OpCosts],
        token_slices: TokenSlices,
        memory_limit: float | None = None,
    ) -> None:
        self.costs = costs
        """Costs that it is found for."""
        self._token_slices, self._memory_limit = token_slices, memory_limit
        self._found: dict[PipelineShape, OptimisedSchedule] = {}

    def __call__(self, shape: PipelineShape, rank: int) -> Iterator[Op]:
        """Return the ops of a rank in order, as `plan.schedules.Schedule` says."""
        return iter(self.found(shape).orders[rank])

    def found(self, shape: PipelineShape) -> "OptimisedSchedule":
        """Return the orders of all ranks, with their makespan in the unit of the costs."""
        from deepspeed_ext.plan.optimise import optimise

        if shape not in self._found:
            cut = self._token_slices
            if len(cut) != shape.num_token_slices:
                cut = TokenSlices((1,) * shape.num_token_slices)
            limit = self._memory_limit or memory_of_1f1b(shape, cut)
            self._found[shape] = optimise(
                shape, self.costs(shape), memory_limit=limit, lengths=cut.lengths, effort=EFFORT
            )
        return self._found[shape]
