"""A schedule whose orders are searched when they are first needed; the solvers are loaded then."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.ops import Op, PipelineShape
from deepspeed_ext.plan.schedules import memory_of_1f1b
from deepspeed_ext.plan.slicing import TokenSlices

if TYPE_CHECKING:
    from deepspeed_ext.plan.solve.orders import OptimisedSchedule

EFFORT = 0.2
"""Effort of the search before a run starts: some seconds of one core, on every rank at once."""


class FoundSchedule:
    """A schedule that is found for each shape of the pipeline at its first use. Every rank finds the same."""

    def __init__(
        self,
        costs: Callable[[PipelineShape], OpCosts],
        token_slices: TokenSlices,
        memory_limit: float | None = None,
    ) -> None:
        self.costs = costs
        """Costs of the ops of a shape, the same on all ranks."""
        self._token_slices = token_slices
        self._memory_limit = memory_limit  # None for as many activations as `1f1b` keeps
        self._found: dict[PipelineShape, OptimisedSchedule] = {}

    def __call__(self, shape: PipelineShape, rank: int) -> Iterator[Op]:
        """Return the ops of a rank in order; see `Schedule`."""
        return iter(self.found(shape).orders[rank])

    def found(self, shape: PipelineShape) -> "OptimisedSchedule":
        """Return the orders of all ranks, with their makespan in the unit of the costs."""
        from deepspeed_ext.plan.solve.orders import optimise

        if shape not in self._found:
            cut = self._token_slices
            if len(cut) != shape.num_token_slices:
                cut = TokenSlices((1,) * shape.num_token_slices)
            limit = self._memory_limit or memory_of_1f1b(shape, cut)
            self._found[shape] = optimise(
                shape, self.costs(shape), memory_limit=limit, lengths=cut.lengths, effort=EFFORT
            )
        return self._found[shape]
