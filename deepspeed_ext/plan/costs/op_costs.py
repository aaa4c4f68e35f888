"""Costs of ops and transfers: the times that a simulation adds up."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import add
from typing import Any

from deepspeed_ext.plan.costs.transfer_costs import TransferCosts
from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape
from deepspeed_ext.plan.text.json_text import parse_json

Table = tuple[tuple[float, ...], ...]
"""A time per stage and token slice: `table[stage][token_slice]`."""

LEAST_SHARE = 1e-9
"""Time of an op that takes none, in that of the longest op, where ops are put in the order of their times."""


@dataclass(frozen=True, slots=True)
class OpCosts:
    """Times of the ops of one micro-batch, and of one transfer between neighbouring stages, in any one unit."""

    forward: Table
    """Time of a forward per stage and token slice."""
    backward: Table
    """Time of a backward per stage and token slice, but for the part in `weight_gradient`."""
    weight_gradient: Table | None = None
    """Time of weight gradients per stage and token slice; None where `backward` has them in it."""
    transfer: float | TransferCosts = 0.0
    """Time from the end of an op until its neighbour may start on the result, as one number: a latency, under which any
    number of messages can be on their way. Or in full: latency, bandwidth and bytes."""
    reductions: Table | None = None
    """Per stage, times to sum its gradients over data-parallel ranks, in pieces: the last layer's, or that of the last
    few, first. None where there is but one replica."""

    @classmethod
    def uniform(
        cls,
        shape: PipelineShape,
        *,
        forward: float = 1.0,
        backward: float = 1.0,
        weight_gradient: float | None = None,
        transfer: float | TransferCosts = 0.0,
    ) -> "OpCosts":
        """Return costs in which every op of a kind takes the same time.

        Args:
            backward: time of a backward, or of its input gradient.
            weight_gradient: time of a weight gradient; None where backwards are whole.
        """

        def table(time: float) -> Table:
            return ((time,) * shape.num_token_slices,) * shape.num_stages

        apart = None if weight_gradient is None else table(weight_gradient)
        return cls(table(forward), table(backward), apart, transfer)

    def duration(self, op: Op) -> float:
        """Time of one op.

        Raises:
            PlanError: if it computes weight gradients apart, and their cost is not known apart.
        """
        kind, stage, _, token_slice = op
        if kind is OpKind.FORWARD:
            return self.forward[stage][token_slice]
        if kind is OpKind.INPUT_GRADIENT:
            return self.backward[stage][token_slice]
        if self.weight_gradient is None:
            if kind is OpKind.BACKWARD:
                return self.backward[stage][token_slice]
            raise PlanError(
                f"op {op} computes weight gradients apart, and the costs have no weight_gradient: add that table, or "
                "choose a schedule that does not split the backward"
            )
        weight_gradient = self.weight_gradient[stage][token_slice]
        return weight_gradient + (self.backward[stage][token_slice] if kind is OpKind.BACKWARD else 0.0)

    def in_order(self) -> "OpCosts":
        """The same costs, in which all forwards and backwards take time, so that no op ends when it starts.

        Programs are lowered in the order of the times. Some ops take none: the last stage's forward, where the whole
        stage is computed in the backward. Such an op gets a billionth of the longest one.
        """
        longest = max(max(row) for table in (self.forward, self.backward) for row in table)
        least = LEAST_SHARE * longest if longest > 0 else 1.0

        def above_zero(table: Table) -> Table:
            return tuple(tuple(time if time > 0 else least for time in row) for row in table)

        if all(time > 0 for table in (self.forward, self.backward) for row in table for time in row):
            return self
        return replace(self, forward=above_zero(self.forward), backward=above_zero(self.backward))

    def durations(self, kind: OpKind) -> Table:
        """Times of all ops of one kind, by stage and token slice; see `duration`."""
        if kind is OpKind.BACKWARD and self.weight_gradient is not None:
            pairs = zip(self.weight_gradient, self.backward, strict=True)
            return tuple(tuple(map(add, *rows)) for rows in pairs)
        if kind is OpKind.FORWARD:
            return self.forward
        if kind is OpKind.WEIGHT_GRADIENT:
            self.duration(Op(kind, 0, 0, 0))  # is there such a table?
            assert self.weight_gradient is not None
            return self.weight_gradient
        return self.backward

    def latency(self, boundary: int) -> float:
        """Time that a message from stage `boundary` to the next, or back, travels after it has left."""
        return self.transfer.latency[boundary] if isinstance(self.transfer, TransferCosts) else self.transfer

    def sending_time(self, boundary: int, token_slice: int) -> float:
        """Return the time for which that message keeps its channel busy, so that the next must wait.

        Args:
            boundary: number of the stage before it.
        """
        if isinstance(self.transfer, TransferCosts):
            return self.transfer.sending_time(boundary, token_slice)
        return 0.0

    @classmethod
    def from_json(cls, text: str, shape: PipelineShape) -> "OpCosts":
        """Read `{"forward": [[per stage][per token slice]], "backward": ..., ...}`; the form is in the command's help.

        `weight_gradient`, `transfer` and `reductions` may be left out. `transfer` is a number, or what
        `TransferCosts.from_fields` reads. `reductions` has a row of any length for each stage, of times by piece.
        With model chunks, rows are for stages; or for pipeline ranks, and then each stage takes its part of the time.

        Raises:
            PlanError: if a table is missing, of another shape than `shape`, or holds anything but times >= 0.
        """
        fields = parse_json(text, "the costs file")
        if not isinstance(fields, dict):
            raise PlanError(
                'costs are not a JSON object: write {"forward": [[...]], "backward": [[...]], "transfer": 0}'
            )
        unknown = fields.keys() - {"forward", "backward", "weight_gradient", "transfer", "reductions"}
        if unknown:
            raise PlanError(
                f"costs have the unknown field {min(unknown)!r}: "
                "the fields are forward, backward, weight_gradient, transfer and reductions"
            )
        return cls(
            _table(fields, "forward", shape),
            _table(fields, "backward", shape),
            _table(fields, "weight_gradient", shape) if "weight_gradient" in fields else None,
            _transfer(fields.get("transfer", 0.0), shape),
            _reductions(fields["reductions"], shape) if "reductions" in fields else None,
        )


def _table(fields: Mapping[str, Any], name: str, shape: PipelineShape) -> Table:
    rows = fields.get(name)
    if not isinstance(rows, list) or any(not isinstance(row, list) for row in rows):
        raise PlanError(f"costs[{name!r}] is not a list of lists: give one list of times for each stage")
    lengths = [len(row) for row in rows]
    if shape.num_model_chunks > 1 and lengths == [shape.num_token_slices] * shape.num_ranks:
        by_rank = [[_time(time, name) / shape.num_model_chunks for time in row] for row in rows]
        return tuple(tuple(by_rank[shape.rank_of(stage)]) for stage in range(shape.num_stages))
    if lengths != [shape.num_token_slices] * shape.num_stages:
        raise PlanError(
            f"costs[{name!r}] has rows of {lengths} times for {shape.num_stages} stages of {shape.num_token_slices} "
            "token slices: give one row for each stage and one time for each token slice"
        )
    return tuple(tuple(_time(time, name) for time in row) for row in rows)


def _reductions(rows: object, shape: PipelineShape) -> Table:
    if not isinstance(rows, list) or any(not isinstance(row, list) or not row for row in rows):
        raise PlanError("costs['reductions'] is not a list of lists: give the times of one or more pieces per stage")
    if len(rows) != shape.num_stages:
        raise PlanError(
            f"costs['reductions'] has {len(rows)} rows for {shape.num_stages} stages: give one row for each stage"
        )
    return tuple(tuple(_time(time, "reductions") for time in row) for row in rows)


def _transfer(value: object, shape: PipelineShape) -> float | TransferCosts:
    return TransferCosts.from_fields(value, shape) if isinstance(value, dict) else _time(value, "transfer")


def _time(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise PlanError(f"costs[{name!r}] has the entry {value!r}, which is not a time: give finite numbers >= 0")
    return float(value)
