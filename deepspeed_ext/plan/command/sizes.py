"""The unit of memory curves: activations of a micro-batch, or bytes, if a file gives the bytes of a token."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from deepspeed_ext.plan.errors import PlanError, UserError
from deepspeed_ext.plan.memory import (
    StepFunction,
    TokenBytes,
    activation_over_time,
    host_memory_over_time,
    memory_over_time,
)
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.text.json_text import parse_json
from deepspeed_ext.plan.text.text_files import read_text
from deepspeed_ext.plan.timeline import Timeline

_BY_STAGE = ("activation", "key_value", "key_value_gradient")
_WHOLE = ("logits", "freed_by_input_gradient", "logits_limit", "stage_input")


@dataclass(frozen=True, slots=True)
class Memory:
    """How memory is counted."""

    lengths: Sequence[float]
    """Tokens of the token slices, or their shares of a sequence; empty for equal ones."""
    token_bytes: TokenBytes | None = None
    """What a token keeps; None to count activations."""

    @property
    def unit(self) -> str:
        """Unit of the curves."""
        return "activations, in micro-batches on one rank" if self.token_bytes is None else "bytes"

    def curves(self, timeline: Timeline) -> list[StepFunction]:
        """Per rank, what it holds over time."""
        if self.token_bytes is None:
            return activation_over_time(timeline, self.lengths or None)
        return memory_over_time(timeline, self.lengths, self.token_bytes)

    def host_curves(self, timeline: Timeline) -> list[StepFunction]:
        """Per rank, what waits on its host over time; empty where nothing does."""
        if self.token_bytes is None or not timeline.host_copies:
            return []
        return host_memory_over_time(timeline, self.lengths, self.token_bytes)


def memory_of(options: argparse.Namespace, shape: PipelineShape, lengths: Sequence[float]) -> Memory:
    """Return how to count memory, by the options.

    Args:
        lengths: tokens of each token slice.

    Raises:
        UserError: if bytes are asked for and nobody says how many tokens there are, or the file is something else.
    """
    if options.token_bytes is None:
        return Memory(lengths)
    if sum(lengths) < 1.5:  # shares of a sequence, or nothing
        raise UserError(
            "--token-bytes needs the tokens of a sequence: add --seq-length, or show a timeline of the trainer's"
        )
    try:
        return Memory(lengths, parse_token_bytes(read_text(options.token_bytes), shape))
    except PlanError as error:
        raise PlanError(f"{options.token_bytes}: {error}") from None


def parse_token_bytes(text: str, shape: PipelineShape) -> TokenBytes:
    """Read `{"activation": x, ...}`: the fields of `TokenBytes`, of which all but the first may be left out.

    The first three are numbers, or lists with one for each stage; so is `stage_input`, where one number stands for all
    stages but the first.

    Raises:
        PlanError: if the text is something else.
    """
    fields = parse_json(text, "the file of sizes")
    if not isinstance(fields, dict) or "activation" not in fields:
        raise PlanError('sizes have no "activation": write {"activation": bytes of a token, ...}, see --help')
    unknown = fields.keys() - {*_BY_STAGE, *_WHOLE}
    if unknown:
        raise PlanError(
            f"sizes have the unknown field {min(unknown)!r}: the fields are {', '.join((*_BY_STAGE, *_WHOLE))}"
        )
    activation, key_value, key_value_gradient = (_by_stage(fields, name, shape.num_stages) for name in _BY_STAGE)
    logits, freed = (_size(fields.get(name, 0.0), name) for name in _WHOLE[:2])
    limit = _size(fields["logits_limit"], "logits_limit") if "logits_limit" in fields else inf
    if freed > 1:
        raise PlanError(f"sizes['freed_by_input_gradient'] is {freed:g}, which is no share: give 0 to 1")
    return TokenBytes(
        activation, key_value, key_value_gradient, logits, freed, limit, _stage_input(fields, shape.num_stages)
    )


def _stage_input(fields: Mapping[str, Any], num_stages: int) -> tuple[float, ...] | None:
    if "stage_input" not in fields:
        return None
    sizes = _by_stage(fields, "stage_input", num_stages)
    return sizes if isinstance(fields["stage_input"], list) else (0.0, *sizes[1:])


def _by_stage(fields: Mapping[str, Any], name: str, num_stages: int) -> tuple[float, ...]:
    entries = fields.get(name, 0.0)
    if not isinstance(entries, list):
        entries = [entries] * num_stages
    if len(entries) != num_stages:
        raise PlanError(
            f"sizes[{name!r}] has {len(entries)} entries for {num_stages} stages: give one number, or as many"
        )
    return tuple(_size(entry, name) for entry in entries)


def _size(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < inf:
        raise PlanError(f"sizes[{name!r}] has the entry {value!r}, which is no size: give finite numbers >= 0")
    return float(value)
