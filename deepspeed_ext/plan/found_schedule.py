"""A schedule whose orders are searched when they are first needed; the solvers are loaded then."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.ops import Op, PipelineShape
from deepspeed_ext.plan.schedules import memory_of_1f1b
from deepspeed_ext.plan.slicing import TokenSlices

if TYPE_CHECKING:
    from deepspeed_ext.plan.solve.orders import OptimisedSchedule

EFFORT = 0.2
"""Effort of the search before a run starts: some seconds of one core."""


class FoundSchedule:
    """A schedule that is found for each shape of the pipeline at its first use.

    Args:
        costs: costs of the ops of a shape.
        memory_limit: activations that a rank may keep; None for as many as `1f1b` keeps.
        ask: returns on every rank the result that a function has on the first one, for a question; a result is a
            list of texts, the ops of a rank each. None = every rank searches.
    """

    def __init__(
        self,
        costs: Callable[[PipelineShape], OpCosts],
        token_slices: TokenSlices,
        memory_limit: float | None = None,
        ask: Callable[[str, Callable[[], Any]], Any] | None = None,
    ) -> None:
        self.costs = costs
        self._token_slices, self._memory_limit, self._ask = token_slices, memory_limit, ask
        self._found: dict[PipelineShape, OptimisedSchedule] = {}
        self._orders: dict[PipelineShape, Sequence[Sequence[Op]]] = {}

    def __call__(self, shape: PipelineShape, rank: int) -> Iterator[Op]:
        """Return the ops of a rank in order; see `Schedule`."""
        if shape not in self._orders:
            self._orders[shape] = self._orders_of(shape)
        return iter(self._orders[shape][rank])

    def _orders_of(self, shape: PipelineShape) -> Sequence[Sequence[Op]]:
        if self._ask is None:
            return self.found(shape).orders
        lines = self._ask(f"order of {shape}", lambda: [" ".join(map(str, each)) for each in self.found(shape).orders])
        return [[Op.parse(word) for word in line.split()] for line in lines]

    def found(self, shape: PipelineShape) -> "OptimisedSchedule":
        """Search here: return the orders of all ranks, with their makespan in the unit of the costs."""
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
