"""A timeline: when each op ran. The simulator predicts one, the engine measures one, drawings show either."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import NamedTuple

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape


class Span(NamedTuple):
    """One op and the time it took, in the unit of its timeline."""

    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Spans of every stage, in the order each stage ran them.

    Attributes:
        shape: extent of the pipeline.
        spans: per stage, its spans by start.
        unit: what the times count, for axis labels: `s` when measured.
    """

    shape: PipelineShape
    spans: tuple[tuple[Span, ...], ...]
    unit: str = ""

    @cached_property
    def start(self) -> float:
        """Start of the first op."""
        return min(span.start for stage in self.spans for span in stage)

    @cached_property
    def end(self) -> float:
        """End of the last op."""
        return max(span.end for stage in self.spans for span in stage)

    @property
    def makespan(self) -> float:
        """Time from the first op's start to the last op's end."""
        return self.end - self.start

    @property
    def busy(self) -> tuple[float, ...]:
        """Time each stage spends in ops."""
        return tuple(sum(span.end - span.start for span in stage) for stage in self.spans)

    @property
    def bubble_ratio(self) -> float:
        """Idle time over stages x makespan, in [0, 1)."""
        if self.makespan == 0:
            return 0.0
        return 1 - sum(self.busy) / (len(self.spans) * self.makespan)

    @property
    def peak_live_token_slices(self) -> tuple[int, ...]:
        """Per stage, the most token slices that had gone forward and not yet finished their backward."""
        return tuple(_peak_live(span.op for span in stage) for stage in self.spans)

    def to_json(self) -> str:
        """Write the timeline as JSON: `from_json` reads it back."""
        return json.dumps(
            {
                "num_stages": self.shape.num_stages,
                "num_micro_batches": self.shape.num_micro_batches,
                "num_token_slices": self.shape.num_token_slices,
                "unit": self.unit,
                "spans": [[[str(span.op), span.start, span.end] for span in stage] for stage in self.spans],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> "Timeline":
        """Read what `to_json` wrote.

        Raises:
            PlanError: if the text is something else.
        """
        try:
            fields = json.loads(text)
            shape = PipelineShape(fields["num_stages"], fields["num_micro_batches"], fields["num_token_slices"])
            spans = tuple(
                tuple(Span(Op.parse(op), float(start), float(end)) for op, start, end in stage)
                for stage in fields["spans"]
            )
            timeline = cls(shape, spans, str(fields["unit"]))
            for stage, row in enumerate(spans):
                for op, start, end in row:
                    inside = op.micro_batch < shape.num_micro_batches and op.token_slice < shape.num_token_slices
                    if op.stage != stage or not inside or not -inf < start <= end < inf:
                        raise PlanError(f"op {op} from {start} to {end} on stage {stage} of {shape}")
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise PlanError(f"not a timeline ({error}): give a file written by --json or by the trainer") from None
        if not any(spans) or len(spans) != shape.num_stages:
            raise PlanError(f"a timeline of {len(spans)} stages for a pipeline of {shape.num_stages}: write it again")
        return timeline


def _peak_live(ops: Iterable[Op]) -> int:
    live = peak = 0
    for op in ops:
        live += 1 if op.kind is OpKind.FORWARD else -1
        peak = max(peak, live)
    return peak


def executed_order(timeline: Timeline) -> Sequence[Sequence[Op]]:
    """Per stage, the ops of a timeline without their times: to hold against a schedule."""
    return [[span.op for span in stage] for stage in timeline.spans]
