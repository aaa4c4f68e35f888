"""What ops and transfers cost: the times a simulation adds up."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape

Table = tuple[tuple[float, ...], ...]
"""A time per stage and token slice: `table[stage][token_slice]`."""


@dataclass(frozen=True, slots=True)
class OpCosts:
    """Times of the ops of one micro-batch, and of one transfer between neighbouring stages, in any one unit.

    Attributes:
        forward: time of a forward per stage and token slice.
        backward: time of a full backward per stage and token slice.
        transfer: time from the end of an op until its neighbour may start on the result.
    """

    forward: Table
    backward: Table
    transfer: float = 0.0

    @classmethod
    def uniform(
        cls, shape: PipelineShape, *, forward: float = 1.0, backward: float = 1.0, transfer: float = 0.0
    ) -> "OpCosts":
        """The same cost for every op of a kind."""
        return cls(
            forward=((forward,) * shape.num_token_slices,) * shape.num_stages,
            backward=((backward,) * shape.num_token_slices,) * shape.num_stages,
            transfer=transfer,
        )

    def duration(self, op: Op) -> float:
        """Time of one op."""
        table = self.forward if op.kind is OpKind.FORWARD else self.backward
        return table[op.stage][op.token_slice]

    @classmethod
    def from_json(cls, text: str, shape: PipelineShape) -> "OpCosts":
        """Read `{"forward": [[per stage][per token slice]], "backward": ..., "weight_gradient": ...?, "transfer": x?}`.

        A `weight_gradient` is added to the backward, which computes both in the schedules of today.

        Raises:
            PlanError: if a table is missing, of another shape than `shape`, or holds anything but times >= 0.
        """
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"costs are not JSON ({error}): see --help for their form") from None
        if not isinstance(fields, dict):
            raise PlanError(
                'costs are not a JSON object: write {"forward": [[...]], "backward": [[...]], "transfer": 0}'
            )
        unknown = fields.keys() - {"forward", "backward", "weight_gradient", "transfer"}
        if unknown:
            raise PlanError(
                f"costs have the unknown field {min(unknown)!r}: "
                "the fields are forward, backward, weight_gradient and transfer"
            )
        backward = _table(fields, "backward", shape)
        if "weight_gradient" in fields:
            extra = _table(fields, "weight_gradient", shape)
            backward = tuple(
                tuple(time + more for time, more in zip(*rows, strict=True))
                for rows in zip(backward, extra, strict=True)
            )
        return cls(_table(fields, "forward", shape), backward, _time(fields.get("transfer", 0.0), "transfer"))


def _table(fields: Mapping[str, Any], name: str, shape: PipelineShape) -> Table:
    rows = fields.get(name)
    if not isinstance(rows, list) or any(not isinstance(row, list) for row in rows):
        raise PlanError(f"costs[{name!r}] is not a list of lists: give one list of times for each stage")
    lengths = [len(row) for row in rows]
    if lengths != [shape.num_token_slices] * shape.num_stages:
        raise PlanError(
            f"costs[{name!r}] has rows of {lengths} times for {shape.num_stages} stages of {shape.num_token_slices} "
            "token slices: give one row for each stage and one time for each token slice"
        )
    return tuple(tuple(_time(time, name) for time in row) for row in rows)


def _time(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise PlanError(f"costs[{name!r}] has the entry {value!r}, which is not a time: give finite numbers >= 0")
    return float(value)
