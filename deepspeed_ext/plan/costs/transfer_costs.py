"""Cost of a transfer from one stage to the next: latency, bandwidth, and the size of a message.

    op of stage i    [F0.0][F0.1]
    channel                [==== 0.0 ====][==== 0.1 ====]        bytes / bandwidth each, one after the other
    at stage i + 1                        '--> 0.0      '--> 0.1    each a latency later

A boundary is where two neighbouring stages meet: boundary i lies between stage i and stage i + 1. Activations cross it
one way and their gradients, of the same size, the other way, each on a channel of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import PipelineShape

_FIELDS = ("latency", "bandwidth", "bytes")


@dataclass(frozen=True, slots=True)
class TransferCosts:
    """Times of transfers between stages that are on different pipeline ranks, in the unit of the op costs."""

    latency: tuple[float, ...]
    """Per boundary, time from the moment a message has left until it is there. It keeps no channel busy."""
    bandwidth: tuple[float, ...]
    """Per boundary, bytes per time."""
    message_bytes: tuple[float, ...]
    """Per token slice, bytes of the activation of one micro-batch."""

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], shape: PipelineShape) -> "TransferCosts":
        """Read `{"latency": x, "bandwidth": y, "bytes": [per token slice]}`; `x` and `y` may be lists by boundary.

        Raises:
            PlanError: if a field is missing, unknown, of another length, or not a finite number; a bandwidth of 0.
        """
        for name in _FIELDS:
            if name not in fields:
                raise PlanError(f"costs['transfer'] has no {name!r}: give latency, bandwidth and bytes, or one number")
        for name in fields:
            if name not in _FIELDS:
                raise PlanError(
                    f"costs['transfer'] has the unknown field {name!r}: the fields are {', '.join(_FIELDS)}"
                )
        costs = cls(
            _numbers(fields, "latency", shape.last_stage, "stage boundary"),
            _numbers(fields, "bandwidth", shape.last_stage, "stage boundary"),
            _numbers(fields, "bytes", shape.num_token_slices, "token slice"),
        )
        if not all(costs.bandwidth):
            raise PlanError("costs['transfer']['bandwidth'] is 0, and nothing would arrive: give more than 0")
        return costs

    def sending_time(self, boundary: int, token_slice: int) -> float:
        """Return the time for which a message keeps its channel busy.

        Args:
            boundary: number of the stage before it.
        """
        return self.message_bytes[token_slice] / self.bandwidth[boundary]


def _numbers(fields: Mapping[str, Any], name: str, count: int, unit: str) -> tuple[float, ...]:
    entries = fields[name]
    if not isinstance(entries, list):
        entries = [entries] * count
    if len(entries) != count:
        raise PlanError(
            f"costs['transfer'][{name!r}] has {len(entries)} entries for {count}: give one, or one for each {unit}"
        )
    for entry in entries:
        if isinstance(entry, bool) or not isinstance(entry, int | float) or not 0 <= entry < inf:
            raise PlanError(
                f"costs['transfer'][{name!r}] has the entry {entry!r}, which cannot be: give finite numbers >= 0"
            )
    return tuple(map(float, entries))
