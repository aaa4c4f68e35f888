"""A timeline: when each op ran. The simulator predicts one, the engine measures one, drawings show either."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import inf
from typing import Any, NamedTuple

from deepspeed_ext.plan.dependencies import reading_stage
from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import LIVE_CHANGE, Op, PipelineShape
from deepspeed_ext.plan.programs.copy_lanes import TimedCopy
from deepspeed_ext.plan.programs.program import Channel, Content
from deepspeed_ext.plan.programs.reductions import Reduction
from deepspeed_ext.plan.text.json_text import parse_json

__all__ = ["Span", "Timeline", "Transfer", "executed_order"]


class Span(NamedTuple):
    """One op and the time it took, in the unit of its timeline."""

    op: Op
    start: float
    end: float


class Transfer(NamedTuple):
    """A result on its way to another rank."""

    op: Op
    """The result, named as `dependencies.result` names it: `0F0.1` is an activation, `1BI0.1` a gradient."""
    channel: Channel
    start: float
    """When it leaves: as its op ends, or once the channel is free."""
    end: float
    """When it is there."""
    sent: float
    """When the channel is free for the next: a latency before the end."""


@dataclass(frozen=True)
class Timeline:
    """Spans of every pipeline rank, in the order each rank ran them."""

    shape: PipelineShape
    spans: tuple[tuple[Span, ...], ...]
    """Per rank, its spans by start."""
    unit: str = ""
    """What the times count, for axis labels: `s` when measured."""
    transfers: tuple[Transfer, ...] = ()
    """By channel and start; none where they take no time, or nobody measured them."""
    reductions: tuple[Reduction, ...] = ()
    """By rank and start; none where there is one replica, or nobody measured them."""
    host_copies: tuple[TimedCopy, ...] = ()
    """By rank and start; none where nothing goes to the host, or nobody measured it."""

    @cached_property
    def start(self) -> float:
        """Start of the first op."""
        return min(span.start for rank in self.spans for span in rank)

    @cached_property
    def end(self) -> float:
        """End of the last op."""
        return max(span.end for rank in self.spans for span in rank)

    @property
    def makespan(self) -> float:
        """Time from the first op's start to the last op's end."""
        return self.end - self.start

    @property
    def duration(self) -> float:
        """Time from the first op's start until the optimizer may step: all ops are done, and all reductions."""
        return max([self.end, *(reduction.end for reduction in self.reductions)]) - self.start

    @property
    def busy(self) -> tuple[float, ...]:
        """Time each rank spends in ops."""
        return tuple(sum(span.end - span.start for span in rank) for rank in self.spans)

    @property
    def bubble_ratio(self) -> float:
        """Idle time over ranks x makespan, in [0, 1)."""
        if self.makespan == 0:
            return 0.0
        return 1 - sum(self.busy) / (len(self.spans) * self.makespan)

    @property
    def peak_live_token_slices(self) -> tuple[int, ...]:
        """Per rank, the most token slices, of any of its stages, that had gone forward and not yet all backward."""
        return tuple(max(accumulate(LIVE_CHANGE[span.op.kind] for span in rank), default=0) for rank in self.spans)

    def to_json(self) -> str:
        """Write the timeline as JSON: `from_json` reads it back."""
        fields = {
            **self.shape.to_fields(),
            "unit": self.unit,
            "spans": [[[str(span.op), span.start, span.end] for span in rank] for rank in self.spans],
        }
        if self.transfers:
            fields["transfers"] = [[str(one.op), one.start, one.end, one.sent] for one in self.transfers]
        if self.reductions:
            fields["reductions"] = self.reductions
        if self.host_copies:
            fields["host_copies"] = self.host_copies
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> "Timeline":
        """Read what `to_json` wrote.

        Raises:
            PlanError: if the text is something else.
        """
        fields: Any = parse_json(text, "a timeline")
        try:
            shape = PipelineShape.from_fields(fields)
            spans = tuple(
                tuple(Span(Op.parse(op), float(start), float(end)) for op, start, end in rank)
                for rank in fields["spans"]
            )
            transfers = tuple(_read_transfer(entry, shape) for entry in fields.get("transfers", ()))
            reductions = tuple(_read_reduction(entry, shape) for entry in fields.get("reductions", ()))
            host_copies = tuple(_read_host_copy(entry, shape) for entry in fields.get("host_copies", ()))
            timeline = cls(shape, spans, str(fields["unit"]), transfers, reductions, host_copies)
            for rank, row in enumerate(spans):
                for op, start, end in row:
                    inside = op.micro_batch < shape.num_micro_batches and op.token_slice < shape.num_token_slices
                    if not inside or op.stage not in shape.stages_of(rank) or not -inf < start <= end < inf:
                        raise ValueError(f"op {op} from {start} to {end} on rank {rank} of {shape}")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise PlanError(f"not a timeline ({error}): give a file written by --json or by the trainer") from None
        if not any(spans) or len(spans) != shape.num_ranks:
            raise PlanError(f"a timeline of {len(spans)} ranks for a pipeline of {shape.num_ranks}: write it again")
        return timeline


def _read_reduction(entry: Sequence[Any], shape: PipelineShape) -> Reduction:
    stage, piece, start, end = entry
    if stage not in range(shape.num_stages) or not -inf < float(start) <= float(end) < inf:
        raise ValueError(f"a reduction of stage {stage} from {start} to {end}")
    return Reduction(int(stage), int(piece), float(start), float(end))


def _read_host_copy(entry: Sequence[Any], shape: PipelineShape) -> TimedCopy:
    content, stage, micro_batch, token_slice, *times = entry
    extents = (stage, shape.num_stages), (micro_batch, shape.num_micro_batches), (token_slice, shape.num_token_slices)
    inside = all(number in range(extent) for number, extent in extents)
    start, arrived, dropped, back, end = map(float, times)
    if not inside or not -inf < start <= arrived <= dropped <= back <= end < inf:
        raise ValueError(f"a host copy of {entry[:4]} at {times}")
    unit = int(stage), int(micro_batch), int(token_slice)
    return TimedCopy(Content(content), *unit, start, arrived, dropped, back, end)


def _read_transfer(entry: Sequence[Any], shape: PipelineShape) -> Transfer:
    name, *times = entry
    op, (start, end, sent) = Op.parse(name), map(float, times)
    target = reading_stage(op, shape)
    inside = max(op.stage, target or 0) < shape.num_stages
    if target is None or not inside or not -inf < start <= sent <= end < inf:
        raise ValueError(f"a transfer of {op} from {start} to {end}")
    return Transfer(op, Channel(shape.rank_of(op.stage), shape.rank_of(target), op.kind), start, end, sent)


def executed_order(timeline: Timeline) -> Sequence[Sequence[Op]]:
    """Per rank, the ops of a timeline without their times: to hold against a schedule."""
    return [[span.op for span in rank] for rank in timeline.spans]
