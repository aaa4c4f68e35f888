"""The Chrome trace that `terapipe plan --trace` writes: those events of the Trace Event Format that it has.

Perfetto and chrome://tracing open it. Times are microseconds from the first op. A process is a pipeline rank.
"""

from typing import Any, Literal

from deepspeed_ext.plan.render.labels import KIND_NAMES
from megatron_terapipe.file_formats.described import ABSENT, description_schema
from megatron_terapipe.search.report.schema.schema_parts import Part


class _Event(Part):
    """An event."""

    name: str
    """What viewers show."""
    pid: int
    """Pipeline rank."""


class _OnThread(_Event):
    tid: int
    """Thread: a model chunk, then the reductions, then copies to the host and back."""


class OpArguments(Part):
    """Where an op belongs."""

    micro_batch: int
    """Micro-batch."""
    token_slice: int
    """Token slice."""


class CopyArguments(Part):
    """A copy in words."""

    what: str
    """What is copied, and for how long it is away."""


class Complete(_OnThread):
    """An op, a reduction, or a copy to the host or back."""

    ph: Literal["X"]
    """Phase of the format: something with a start and a duration."""
    cat: Literal[(*KIND_NAMES.values(), "reduction", "host copy")]  # type: ignore[valid-type]
    """What it is."""
    ts: float
    """Start."""
    dur: float
    """Duration."""
    args: OpArguments | CopyArguments = ABSENT
    """Of an op where it belongs, of a copy its words."""


class NameArguments(Part):
    """The name of a rank or a thread."""

    name: str
    """What viewers show."""


class PlaceArguments(Part):
    """The place of a rank among all."""

    sort_index: int
    """Pipeline rank."""


class Metadata(_OnThread):
    """Name or place of a rank or a thread."""

    ph: Literal["M"]
    """Phase of the format: about viewers."""
    name: Literal["process_name", "process_sort_index", "thread_name"]
    """What is said."""
    args: NameArguments | PlaceArguments
    """The name or the place."""


class CounterArguments(Part):
    """The value of a counter."""

    held: float
    """Activations of micro-batches, or bytes."""


class Counter(_Event):
    """What a rank holds from a time on."""

    ph: Literal["C"]
    """Phase of the format: a counter."""
    name: Literal["memory", "host memory"]
    """Where."""
    ts: float
    """Time."""
    args: CounterArguments
    """How much."""


class TransferArguments(Part):
    """What a message carries."""

    result_of: str
    """The op whose result it is."""


class Message(_OnThread):
    """Start or end of a message to another rank, where transfers take time."""

    ph: Literal["b", "e"]
    """Phase of the format: the start or the end of something on a track of its own."""
    cat: Literal["transfer"]
    """What it is."""
    id: str
    """The same for start and end."""
    ts: float
    """Time."""
    args: TransferArguments = ABSENT
    """Of a start."""


class Arrow(_OnThread):
    """Start or end of an arrow from an op to one on another rank that reads its result."""

    ph: Literal["s", "f"]
    """Phase of the format: the start or the end of an arrow."""
    name: Literal["transfer"]
    """What it is."""
    cat: Literal["transfer"]
    """What it is."""
    id: int
    """The same for start and end."""
    ts: float
    """A time within the op."""
    bp: Literal["e"] = ABSENT
    """Of an end: it belongs to the op around it."""


class ChromeTrace(Part):
    """A timeline in the Trace Event Format."""

    traceEvents: list[Complete | Metadata | Counter | Message | Arrow]  # noqa: N815 (the format's name)
    """All events."""
    displayTimeUnit: Literal["ms"]  # noqa: N815 (the format's name)
    """Unit in which viewers show times."""


def trace_schema() -> dict[str, Any]:
    """Return the JSON Schema of the trace."""
    return description_schema(ChromeTrace)
