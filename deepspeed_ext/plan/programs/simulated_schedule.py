"""A schedule with the timeline that programs are lowered from, simulated once for each shape."""

from collections.abc import Callable, Iterator, Sequence

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.ops import Op, PipelineShape
from deepspeed_ext.plan.programs.device import Device
from deepspeed_ext.plan.programs.host_copies import HostCopySettings
from deepspeed_ext.plan.programs.planned_ops import check_num_ops, num_ops
from deepspeed_ext.plan.schedules import Schedule, rank_orders
from deepspeed_ext.plan.simulate import check_complete, simulate
from deepspeed_ext.plan.timeline import Span

FEW_OPS = 16_384
"""Ops of a step for which plain Python takes a second or two, about as long as loading compiled code."""

SpansOfRank = Callable[[int], Sequence[Span]]
"""Called with a pipeline rank, returns its ops with their simulated start and end."""


class SimulatedSchedule:
    """A schedule that keeps its simulated timelines. It is a schedule itself.

    Args:
        costs: of the ops of a shape, the same on all ranks; None for `lowering_costs`.
        complete: every token slice must go forward and backward.
    """

    def __init__(
        self, schedule: Schedule, *, costs: Callable[[PipelineShape], OpCosts] | None = None, complete: bool = True
    ) -> None:
        self._schedule, self._complete = schedule, complete
        self.costs = costs or lowering_costs
        """Costs that the timeline of a shape has."""
        self._spans: dict[PipelineShape, SpansOfRank] = {}
        self.proven: set[tuple[PipelineShape, Device, HostCopySettings | None]] = set()
        """Shapes, devices and host copies for which `lowering.check_lowering` has found that its programs end."""

    @classmethod
    def of(cls, schedule: Schedule) -> "SimulatedSchedule":
        """A schedule of training steps; one that remembers already stays as it is."""
        return schedule if isinstance(schedule, cls) else cls(schedule)

    def __call__(self, shape: PipelineShape, rank: int) -> Iterator[Op]:
        """The ops of a rank, as `schedules.Schedule` says."""
        return self._schedule(shape, rank)

    def spans(self, shape: PipelineShape) -> SpansOfRank:
        """Return the simulated spans of any rank, by its number.

        Raises:
            PlanError: if an op is missing, or where it does not belong, or there are too many.
            ScheduleDeadlock: if the ops of ranks wait for each other.
        """
        if shape not in self._spans:
            self._spans[shape] = self._simulate(shape)
        return self._spans[shape]

    def _simulate(self, shape: PipelineShape) -> SpansOfRank:
        check_num_ops(shape)
        costs = self.costs(shape).in_order()
        if num_ops(shape) <= FEW_OPS:
            orders = rank_orders(self._schedule, shape)
            if self._complete:
                # A forward without its backward would train on a part of the gradients, and nobody would notice.
                check_complete(orders, shape)
            return simulate(orders, shape, costs).spans.__getitem__
        from deepspeed_ext.plan.simulate.compiled import CompiledOrders

        compiled = CompiledOrders.of_schedule(self._schedule, shape)
        if self._complete:
            compiled.check_complete()
        return compiled.simulate(costs).spans


def lowering_costs(shape: PipelineShape) -> OpCosts:
    """Costs of the timeline that programs are lowered from where no others are known: a backward takes two forwards."""
    return OpCosts.uniform(shape, weight_gradient=1.0)
