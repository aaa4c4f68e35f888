"""A step that was measured, as the trainer writes it and the plan command reads it: a timeline, and what ran."""

import json
from dataclasses import dataclass
from typing import Any

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.text.json_text import parse_json
from deepspeed_ext.plan.timeline import Timeline


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step."""

    timeline: Timeline
    """When its ops ran."""
    schedule: str | None = None
    """Name of the schedule; None if unknown."""
    iteration: int | None = None
    """The step's number in its run; None if it was simulated."""
    token_slices: tuple[float, ...] = ()
    """Tokens of each token slice; empty if unknown."""

    def to_json(self) -> str:
        """Write the step as JSON: `from_json` reads it back, and `Timeline.from_json` reads its timeline."""
        about = {"schedule": self.schedule, "iteration": self.iteration, "token_slices": list(self.token_slices)}
        return json.dumps(about | json.loads(self.timeline.to_json()))

    @classmethod
    def from_json(cls, text: str) -> "StepRecord":
        """Read a step, or a timeline that says less.

        Raises:
            PlanError: if the text is neither.
        """
        timeline = Timeline.from_json(text)
        fields: Any = parse_json(text, "a measured step")
        schedule, iteration = fields.get("schedule"), fields.get("iteration")
        lengths = fields.get("token_slices") or []
        if (
            not isinstance(schedule, str | None)
            or not isinstance(iteration, int | None)
            or not isinstance(lengths, list)
            or any(isinstance(length, bool) or not isinstance(length, int | float) for length in lengths)
            or len(lengths) not in (0, timeline.shape.num_token_slices)
        ):
            raise PlanError(
                "not a measured step (schedule, iteration or token_slices are not what the trainer writes): write it "
                "again"
            )
        return cls(timeline, schedule, iteration, tuple(lengths))
