"""Files without a class of their own: costs, token bytes and stage partitions; timelines and answers of commands."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from deepspeed_ext.plan.ops import OpKind, Placement
from deepspeed_ext.plan.programs.program import Content
from megatron_terapipe.class_schema import ABSENT, class_schema
from megatron_terapipe.search.answer.json_schema import Part

Amount = Annotated[float, Field(ge=0)]
"""A time or a number of bytes."""
Rows = list[list[Amount]]
"""Times by stage, or by pipeline rank, and token slice."""


class Transfer(Part):
    """Cost of a transfer from one stage to the next."""

    latency: Amount | list[Amount]
    """Time from the moment a message has left until it is there; a list has one for each boundary of two stages."""
    bandwidth: Annotated[float, Field(gt=0)] | list[Annotated[float, Field(gt=0)]]
    """Bytes per time; a list has one for each boundary."""
    bytes: Amount | list[Amount]
    """Bytes of the activation of one micro-batch; a list has one number for each token slice."""


class CostsFile(Part):
    """Times of ops and transfers, in one unit of your choice."""

    forward: Rows
    """Time of a forward: a row for each stage, a time for each token slice."""
    backward: Rows
    """Time of a backward, without that in `weight_gradient`."""
    weight_gradient: Rows = ABSENT
    """Time of weight gradients, if they are separate. Schedules that split the backward need it."""
    transfer: Amount | Transfer = ABSENT
    """Time of a transfer between neighbouring stages. If left out: 0."""
    reductions: list[Annotated[list[Amount], Field(min_length=1)]] = ABSENT
    """Times to sum gradients over replicas: a row for each stage, its last layers first."""


class TokenBytesFile(Part):
    """Bytes that one token of a micro-batch keeps on a stage. A list has one number for each stage."""

    activation: Amount | list[Amount]
    """Tensors that autograd keeps from forward to backward, without keys and values."""
    key_value: Amount | list[Amount] = ABSENT
    """Keys and values. If left out: 0."""
    key_value_gradient: Amount | list[Amount] = ABSENT
    """Gradients of keys and values. If left out: 0."""
    logits: Amount = ABSENT
    """Logits and tensors that the loss keeps, on the last stage. If left out: 0."""
    freed_by_input_gradient: Annotated[float, Field(ge=0, le=1)] = ABSENT
    """Share of `activation` that a BI frees, where the backward is in two parts. If left out: 0."""
    logits_limit: Amount = ABSENT
    """Bytes of logits that a rank keeps at most. If left out: no limit."""
    stage_input: Amount | list[Amount] = ABSENT
    """Input of a stage, which is all that a forward keeps where stages are recomputed; one number is for all stages but
    the first, which reads tokens. If left out: stages are not recomputed."""
    state: Amount | list[Amount] = ABSENT
    """States that a token slice leaves to the next one, whatever its length. If left out: 0."""


def partition_schema() -> dict[str, Any]:
    """Return the JSON Schema of the file of `--stage-partition`."""
    return {
        "title": "Stage partition",
        "description": "The first layer of each stage, rising from 0, then the number of layers: [0, 5, 12].",
        "type": "array",
        "prefixItems": [{"const": 0}],
        "items": {"type": "integer", "minimum": 1},
        "minItems": 2,
        "uniqueItems": True,
    }


OpText = Annotated[str, Field(pattern=rf"^[0-9]+({'|'.join(OpKind)})[0-9]+\.[0-9]+$")]
"""An op: `2F0.3` is the forward of token slice 3 of micro-batch 0 on stage 2."""
Index = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Curve = list[tuple[float, float]]
"""Times, and the value from each of them on."""
Spans = list[list[tuple[OpText, float, float]]]
"""For each pipeline rank its ops, each with its start and end."""


class _Shape(Part):
    """Shape of a pipeline."""

    num_stages: Count
    """Number of stages."""
    num_micro_batches: Count
    """Micro-batches of the step."""
    num_token_slices: Count
    """Token slices of a micro-batch."""
    num_model_chunks: Count = ABSENT
    """Stages of each pipeline rank. If left out: 1."""
    placement: Placement = ABSENT
    """Which stages a rank owns. If left out: one each."""


class TimelineFile(_Shape):
    """A step: when each op ran. The trainer's `--timeline` writes one for each measured step."""

    schedule: str | None
    """Name of the schedule; null = unknown."""
    iteration: int | None = ABSENT
    """Number of the step in its run; null = it was simulated."""
    token_slices: list[float]
    """Tokens of each token slice, or their shares of a sequence; empty = unknown."""
    unit: str
    """Unit of all times: `s` where they were measured; empty = that of the costs."""
    spans: Spans
    """For each pipeline rank its ops, in the order it ran them, each with its start and end."""
    transfers: list[tuple[OpText, float, float, float]] = ABSENT
    """Results on their way to another rank, each with its start, its end, and when the next message could leave. The
    gradient that a backward sends is called BI."""
    reductions: list[tuple[Index, Index, float, float]] = ABSENT
    """Sums of gradients over replicas: stage, number of the piece, start and end."""
    host_copies: list[tuple[Content, Index, Index, Index, float, float, float, float, float]] = ABSENT
    """Tensors that went to the host and back: content, stage, micro-batch, token slice; start and end of the copy to
    the host, when the device dropped it, start and end of the copy back."""


class PlannedStep(TimelineFile):
    """A schedule, simulated; or a measured step, compared with its simulation."""

    makespan: float
    """Time from the first op's start to the last op's end."""
    bubble_ratio: float
    """Idle time / (pipeline ranks x makespan), in [0, 1)."""
    peak_live_token_slices: list[int]
    """For each rank, the most token slices whose forward is done and whose backward is not complete."""
    peak_activation: list[float]
    """For each rank, the most activations that it keeps, in those of one micro-batch."""
    peak_memory_bytes: list[float] = ABSENT
    """For each rank, the most bytes that it keeps; with `--token-bytes`."""
    memory_bytes: list[Curve] = ABSENT
    """For each rank, times, and the bytes that it keeps from then on; with `--token-bytes`."""
    peak_host_memory_bytes: list[float] = ABSENT
    """For each rank, the most bytes that wait on its host; with `--offload`."""
    host_memory_bytes: list[Curve] = ABSENT
    """For each rank, times, and the bytes that wait on its host from then on; with `--offload`."""
    deadlock_free: Literal[True]
    """That no rank waits for ever."""
    critical_path: list[OpText]
    """The ops that decide the makespan, first to last."""
    orders: list[list[OpText]]
    """For each rank its ops, in their order."""
    duration: float = ABSENT
    """Time until the optimizer may step; with reductions."""
    lower_bound: float = ABSENT
    """No schedule has a smaller makespan; where a schedule was searched for."""
    stage_partition: list[Index] = ABSENT
    """First layer of each stage, and the number of layers; with `--solve-stages`."""
    eta: float = ABSENT
    """Simulated over measured makespan; this and all below with `--timeline`."""
    simulated: dict[str, float | Spans] = ABSENT
    """The simulation with mean op times: `makespan`, `bubble_ratio` and `spans`, as above; the makespan
    `..._with_transfer_and_overhead`, the same with the estimated transfer and overhead of the host, and
    `..._with_own_op_times`, where each op takes its own measured time."""
    costs: CostsFile = ABSENT
    """Mean op times of the simulation, and the estimated time from the end of an op until a waiting one starts."""
    host_overhead: float = ABSENT
    """Estimated overhead of the host between ops."""
    steps: list[dict[str, float | None]] = ABSENT
    """`iteration`, `makespan` and `bubble_ratio` of all measured steps; the figures are those of the median one."""
    mean_times: dict[str, dict[Literal["measured", "simulated"], float]] = ABSENT
    """Mean time, by kind of op."""
    time_by_rank: list[dict[Literal["busy", "dependency", "transfer", "host_overhead"], float]] = ABSENT
    """For each rank, its time in ops, waiting for ops of others, waiting for transfers, and between ops that need not
    wait."""
    largest_differences: list[dict[str, OpText | float]] = ABSENT
    """The ops that differ most from the simulation: `op`, and measured less simulated `duration` and start (`late`)."""


class Deadlock(Part):
    """A schedule that deadlocks, with the shape of its pipeline and its `orders` where the order itself is sound."""

    model_config = ConfigDict(extra="allow")
    schedule: str
    """Name of the schedule, or its file."""
    deadlock_free: Literal[False]
    """That ranks wait for ever."""
    reason: str
    """The ranks that wait, and for which ops."""


def plan_schema() -> dict[str, Any]:
    """Return the JSON Schema of the answer of `terapipe plan --json`."""
    return class_schema(PlannedStep | Deadlock) | {"title": "Answer of plan"}
