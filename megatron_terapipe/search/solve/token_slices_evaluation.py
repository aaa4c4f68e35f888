"""Judges cuts by the simulated makespan, of fewer micro-batches where a step has very many."""

from dataclasses import replace

from deepspeed_ext.plan.costs.transfer_costs import TransferCosts
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.schedules import Schedule
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.plan.solve.evaluation import FixedSchedule
from deepspeed_ext.plan.solve.token_slice_costs import TokenSliceCosts

MOST_OPS = 4_000
"""Ops that are played for each cut: less than a tenth of a millisecond."""


class ExtrapolatedSchedule:
    """Judges cuts by one schedule; a `plan.solve.evaluation.Evaluation`.

    Once the pipeline is full each further round of micro-batches takes as long as the one before, so that the makespan
    of many is on the straight line through those of two smaller numbers.

    Attributes:
        num_ops: ops that were played so far.
    """

    def __init__(
        self, schedule: Schedule, shape: PipelineShape, costs: TokenSliceCosts, transfer: float | TransferCosts
    ) -> None:
        """Prepare.

        Args:
            schedule: that runs.
            shape: of the pipeline.
            costs: times of token slices.
            transfer: as `OpCosts.transfer`.

        Raises:
            PlanError: if the schedule does not take the shape.
        """
        ranks, wanted = shape.num_ranks, shape.num_micro_batches
        ops_each = 2 * shape.num_stages * shape.num_token_slices
        fewest = max(2 * ranks, MOST_OPS // ops_each // ranks * ranks) + wanted % ranks
        played = (wanted,) if wanted <= fewest + ranks else (fewest, fewest + ranks)
        self.num_ops = 0
        self._rest = (wanted - played[-1]) / ranks
        self._parts = [
            FixedSchedule(schedule, replace(shape, num_micro_batches=number), costs, transfer=transfer)
            for number in played
        ]

    def __call__(self, cut: TokenSlices) -> float:
        """Makespan with a cut, in seconds."""
        first, *more = (part(cut) for part in self._parts)
        self.num_ops = sum(part.num_ops for part in self._parts)
        return first if not more else more[0] + self._rest * (more[0] - first)

    def change_costs(self, token_slice_costs: TokenSliceCosts) -> None:
        """Judge by other costs from now on."""
        for part in self._parts:
            part.change_costs(token_slice_costs)

    def adapt(self, cut: TokenSlices) -> None:
        """There is one order only."""
