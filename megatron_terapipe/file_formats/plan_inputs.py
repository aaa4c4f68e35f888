"""Files that `terapipe plan` reads: costs of ops, bytes of a token, stage partitions."""

from typing import Annotated, Any

from pydantic import Field

from megatron_terapipe.file_formats.described import ABSENT, description_schema
from megatron_terapipe.search.report.schema.schema_parts import Part

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
    """What autograd keeps from forward to backward, without keys and values."""
    key_value: Amount | list[Amount] = ABSENT
    """Keys and values. If left out: 0."""
    key_value_gradient: Amount | list[Amount] = ABSENT
    """Gradients of keys and values. If left out: 0."""
    logits: Amount = ABSENT
    """Logits and what the loss keeps, on the last stage. If left out: 0."""
    freed_by_input_gradient: Annotated[float, Field(ge=0, le=1)] = ABSENT
    """Share of `activation` that a BI frees, where the backward is in two parts. If left out: 0."""
    logits_limit: Amount = ABSENT
    """Bytes of logits that a rank keeps at most. If left out: no limit."""
    stage_input: Amount | list[Amount] = ABSENT
    """Input of a stage, which is all that a forward keeps where stages are recomputed; one number is for all stages but
    the first, which reads tokens. If left out: stages are not recomputed."""


def costs_schema() -> dict[str, Any]:
    """Return the JSON Schema of the file of `--costs`."""
    return description_schema(CostsFile)


def token_bytes_schema() -> dict[str, Any]:
    """Return the JSON Schema of the file of `--token-bytes`."""
    return description_schema(TokenBytesFile)


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
