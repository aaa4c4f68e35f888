"""The measured timeline of a run, beside its simulation."""

from pathlib import Path

from deepspeed_ext.plan.command.steps import alike, name_of, read_steps
from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.measured import Comparison
from deepspeed_ext.plan.render import Panel
from megatron_terapipe.training.records.events import RunStart

MOST_OPS = 12_000
"""Ops of a timeline that is drawn at most: a page of them is 2 MB."""


class MeasuredSteps:
    """Measured steps of a run.

    Args:
        path: a file of a step, or the directory of several.

    Raises:
        UserError: if there is none, or they are damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        steps = alike(read_steps(path))
        self.title = name_of(path, steps)
        try:
            self.comparison = Comparison(tuple(step.timeline for step in steps))
            # Simulated here, so that what cannot be is said here.
            self.simulated = self.comparison.simulated
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from None

    @property
    def num_steps(self) -> int:
        """Steps that were measured."""
        return len(self.comparison.steps)

    @property
    def measured(self) -> float:
        """Measured bubble ratio, of the median step."""
        return self.comparison.measured.bubble_ratio

    @property
    def panels(self) -> list[Panel]:
        """Its measured and its simulated timeline; empty if they have too many ops to draw."""
        if sum(map(len, self.simulated.spans)) > MOST_OPS:
            return []
        return [
            Panel(f"{self.title}: measured", self.comparison.measured),
            Panel("simulated with the measured op times", self.simulated),
        ]


def directory_of(start: RunStart | None) -> Path | None:
    """Return the directory of timelines of a run; None if it wrote none, or it is gone."""
    if start is None or start.timeline is None:
        return None
    path = Path(start.directory) / start.timeline
    return path if path.is_dir() else None
