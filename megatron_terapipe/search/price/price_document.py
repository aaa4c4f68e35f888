"""The JSON of a price: classes whose fields are the keys, in answers of the search and where a report reads them."""

from dataclasses import fields
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from megatron_terapipe.search.machine.entries import ClosedModel
from megatron_terapipe.search.price.cost_model import OPTIONAL_PARTS, TimeBreakdown
from megatron_terapipe.search.price.memory import RankMemory

Amount = Annotated[float, Field(ge=0, le=1e40)]
"""Seconds, bytes or bytes per second. Their sums have no overflow."""


def _with_all_fields(kind: type[Any], *more: str) -> AfterValidator:
    """Return a validator of objects that have the fields of a dataclass as keys, and `more`."""
    required = [name for name in (*(each.name for each in fields(kind)), *more) if name not in OPTIONAL_PARTS]

    def whole(amounts: dict[str, float]) -> dict[str, float]:
        if missing := [name for name in required if name not in amounts]:
            raise ValueError(f"{missing[0]} is missing")
        return amounts

    return AfterValidator(whole)


BreakdownObject = Annotated[dict[str, Amount], _with_all_fields(TimeBreakdown)]
"""Seconds of an iteration by their cause."""

MemoryObject = Annotated[dict[str, Amount], _with_all_fields(RankMemory, "total")]
"""Bytes of a pipeline rank by their use, and their sum."""


class Speed(ClosedModel):
    """Published figures that follow from the time of one iteration."""

    iteration_time_s: Amount
    tokens_per_s: Amount
    tokens_per_s_per_device: Amount
    """The same, divided by the devices in use."""
    tflops_per_device: Amount
    """FLOPs of the model in a second and device, in 10^12, counted as for `mfu`."""
    mfu: Amount | None
    """FLOPs of the model over the peak of the devices in use: each token attends to the whole sequence, without
    recomputation, as most published figures are counted. Null where the peak is a guess."""
    mfu_causal: Amount | None
    """The same, but only scores that are computed are counted: a token attends to itself and those before it, or in its
    window."""
    tflops_per_device_causal: Amount
    """FLOPs of the model in a second and device, in 10^12, counted as for `mfu_causal`."""


class PredictedPart(Speed):
    """Predicted cost of a strategy."""

    interval_s: tuple[Amount, Amount] | None
    """Bounds that contain the measured seconds with the probability `interval_coverage`; null = not known."""
    interval_coverage: Amount
    """That probability, in [0, 1]."""
    bubble_ratio: Amount
    """Idle time / (pipeline ranks x makespan), in [0, 1]."""
    peak_memory_bytes: Amount
    """Bytes of the fullest rank; 0 = not predicted."""
    breakdown: BreakdownObject
    """Seconds of the busiest pipeline rank by their cause; they add up to the iteration."""
    memory_per_rank: list[MemoryObject]
    """Peak bytes of each pipeline rank by their use; empty = not predicted."""
    simulated: bool
    """Whether the schedule was simulated; else its time is a closed form."""
    notes: list[str]
    """Warnings about this prediction."""
