"""The cases of pipelines that `tests.gpu` plays on real communicators: pure data.

A case is played trial by trial. A trial is one training step; it is cold if the engine, and with it every communicator,
was made for it. A drain makes one rank wait for its whole device just before one op:

    rank 0   F0.0  F0.1  B0.1  B0.0
    rank 1   F0.0 |F0.1  B0.1  B0.0      | drain before op 1 of rank 1
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from deepspeed_ext.plan.costs import OpCosts
from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import Op, PipelineShape
from deepspeed_ext.plan.programs.device import DeviceModel
from deepspeed_ext.plan.programs.lowering import lower
from deepspeed_ext.plan.schedules import OPTIMISED, fixed, rank_orders, schedule_named


class DrainKind(StrEnum):
    """How a rank waits for its device."""

    FREE = "empty_cache"
    """Give the allocator's memory back, as the allocator does when there is no other left."""
    SYNCHRONIZE = "synchronize"
    """Wait until the device is empty, as loading a kernel may."""
    NEVER = "never returns"
    """Wait for ever. It shows that a case that hangs is told as such."""


class Drain(NamedTuple):
    """A wait for the device.

    Attributes:
        kind: how.
        rank: pipeline rank.
        op: before which op of the rank, counted from 0.
    """

    kind: DrainKind
    rank: int
    op: int


class Trial(NamedTuple):
    """One step.

    Attributes:
        cold: on communicators that have carried no message yet.
        drain: see `Drain`; None for none.
    """

    cold: bool
    drain: Drain | None = None


@dataclass(frozen=True)
class Case:
    """A schedule and a shape, as a small model runs them."""

    schedule: str
    num_ranks: int
    num_model_chunks: int
    """V, model chunks of a rank."""
    num_micro_batches: int
    num_token_slices: int
    hardware_queues: int = 32
    drains: tuple[DrainKind, ...] = ()
    """Kinds of drains, each before every op of every rank in turn, on warm communicators."""
    cold_drains: tuple[DrainKind, ...] = ()
    """The same on cold ones."""

    def __str__(self) -> str:
        shape = (self.num_ranks, self.num_model_chunks, self.num_micro_batches, self.num_token_slices)
        return f"{self.schedule} {shape}"

    @property
    def shape(self) -> PipelineShape:
        """Extent of the pipeline."""
        return PipelineShape(
            num_stages=self.num_ranks * self.num_model_chunks,
            num_micro_batches=self.num_micro_batches,
            num_token_slices=self.num_token_slices,
            num_model_chunks=self.num_model_chunks,
        )

    def orders(self) -> list[list[Op]]:
        """The ops of every pipeline rank, in order."""
        if self.schedule != OPTIMISED:
            return rank_orders(schedule_named(self.schedule), self.shape)
        from deepspeed_ext.plan.solve.orders import optimise

        costs = OpCosts.uniform(self.shape, weight_gradient=1.0)
        found = optimise(self.shape, costs, memory_limit=float(self.num_micro_batches), effort=0.05)
        return [list(order) for order in found.orders]

    def refusal(self, orders: Sequence[Sequence[Op]]) -> str:
        """Why the plan's check would not let the case run on its hardware queues; empty if it would."""
        try:
            lower(fixed(orders), self.shape, device=DeviceModel(hardware_queues=self.hardware_queues))
        except PlanError as refused:
            return str(refused)
        return ""

    def phases(self, orders: Sequence[Sequence[Op]]) -> dict[str, list[Trial]]:
        """Trials by the name of what they try, in the order in which they are played."""

        def everywhere(kind: DrainKind, *, cold: bool) -> list[Trial]:
            return [Trial(cold, Drain(kind, rank, op)) for rank, order in enumerate(orders) for op in range(len(order))]

        phases = {COLD: [Trial(cold=True)], WARM: [Trial(cold=False)] * 2}
        phases |= {f"{kind} at each op": everywhere(kind, cold=False) for kind in self.drains}
        return phases | {f"cold, {kind} at each op": everywhere(kind, cold=True) for kind in self.cold_drains}


COLD, WARM = "cold", "warm"
"""Names of the phases that every case has."""

ONE_STAGE_EACH = ((2, 1, 1, 4), (2, 1, 2, 2), (2, 1, 4, 4), (4, 1, 1, 8), (4, 1, 2, 2))
"""Shapes (P, V, M, S) in which ranks have waited for each other in a model of the device; one micro-batch is this
project's own case."""

SEVERAL_STAGES_EACH = ((2, 2, 2, 4), (2, 2, 4, 4), (2, 4, 4, 8))
"""The same for several stages on a rank."""

OF_SEVERAL_STAGES = ("interleaved", "breadth-first")
"""Schedules for several stages on a rank."""

QUEUES = (32, 8, 1)
"""What the trainer sets, what the driver has, and what Megatron's scripts set."""


def cases() -> Iterator[Case]:
    """All cases."""
    both = (DrainKind.FREE, DrainKind.SYNCHRONIZE)
    for queues in QUEUES:
        for schedule in ("gpipe", "1f1b", "zero-bubble", OPTIMISED, *OF_SEVERAL_STAGES):
            shapes = SEVERAL_STAGES_EACH if schedule in OF_SEVERAL_STAGES else ONE_STAGE_EACH
            for shape in shapes:
                drains = both if queues == QUEUES[0] else ()
                # A cold trial makes every communicator anew, which takes seconds: the smallest shape alone.
                cold = drains[1:] if shape == ONE_STAGE_EACH[0] else ()
                yield Case(schedule, *shape, queues, drains, cold)
