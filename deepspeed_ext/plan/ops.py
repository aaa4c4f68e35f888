"""Ops: the units of work that a schedule puts in order."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

from deepspeed_ext.plan.errors import PlanError

__all__ = ["LIVE_CHANGE", "Op", "OpKind", "PipelineShape", "Placement"]


class OpKind(StrEnum):
    """Kinds of ops; the value is the letter in the text form."""

    FORWARD = "F"
    BACKWARD = "B"
    """The full backward: gradients of the input and of the weights."""
    INPUT_GRADIENT = "BI"
    """The part of the backward that the stage before waits for."""
    WEIGHT_GRADIENT = "BW"
    """The rest of it, which nothing waits for but the optimizer step."""


LIVE_CHANGE: Mapping[OpKind, int] = MappingProxyType(
    {OpKind.FORWARD: 1, OpKind.INPUT_GRADIENT: 0, OpKind.WEIGHT_GRADIENT: -1, OpKind.BACKWARD: -1}
)
"""By how many an op changes the live token slices of its rank: one lives until all of its backward is done, since
weight gradients read what the forward kept."""

_TEXT_FORM = re.compile(r"([0-9]{1,9})([A-Z]+)([0-9]{1,9})(?:\.([0-9]{1,9}))?")
_KINDS = {kind.value: kind for kind in OpKind} | {"I": OpKind.INPUT_GRADIENT, "W": OpKind.WEIGHT_GRADIENT}
"""Kinds by their letters; `I` and `W` are those of schedules written for torch.distributed.pipelining."""


class Op(NamedTuple):
    """One forward or backward, or a part of one, of one token slice of one micro-batch on one stage. Written `2F0.3`.

    Example:
        >>> str(Op(OpKind.FORWARD, stage=2, micro_batch=0, token_slice=3))
        '2F0.3'
        >>> Op.parse("2F0.3").token_slice
        3
    """

    kind: OpKind
    stage: int
    micro_batch: int
    token_slice: int

    def __str__(self) -> str:
        """The text form: stage, kind, micro-batch, token slice."""
        return f"{self.stage}{self.kind.value}{self.micro_batch}.{self.token_slice}"

    @classmethod
    def parse(cls, text: str) -> "Op":
        """Read the text form back. The token slice may be left out where there is but one: `2F0`.

        Raises:
            PlanError: if the text has another form.
        """
        match = _TEXT_FORM.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None or match[2] not in _KINDS:
            kinds = " or ".join(kind.value for kind in OpKind)
            raise PlanError(
                f"op {text!r} is not written as stage, {kinds}, micro-batch, '.', token slice: write it as 2F0.3"
            )
        return cls(_KINDS[match[2]], int(match[1]), int(match[3]), int(match[4] or 0))


class Placement(StrEnum):
    """On which pipeline rank each stage stands, where a rank owns several.

    With four stages on two ranks:

    looped    rank 0: stages 0 2      rank 1: stages 1 3
    v         rank 0: stages 0 3      rank 1: stages 1 2
    """

    LOOPED = "looped"
    """Round and round, as Megatron's interleaving."""
    V = "v"
    """There and back, so that the loss is where the tokens are (arXiv 2405.15362)."""


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """Extent of the pipeline: how many stages, micro-batches and token slices, and who owns the stages.

    Example:
        >>> shape = PipelineShape(num_stages=8, num_micro_batches=4, num_model_chunks=2)
        >>> shape.num_ranks, shape.rank_of(5), list(shape.stages_of(1))
        (4, 1, [1, 5])

    Raises:
        PlanError: if an extent is not a positive whole number, or the stages cannot be dealt evenly.
    """

    num_stages: int
    num_micro_batches: int
    num_token_slices: int = 1
    num_model_chunks: int = 1
    """Stages that each pipeline rank owns."""
    placement: Placement = Placement.LOOPED

    def __post_init__(self) -> None:
        """Check every extent."""
        for name in ("num_stages", "num_micro_batches", "num_token_slices", "num_model_chunks"):
            extent = getattr(self, name)
            if not isinstance(extent, int) or extent < 1:
                raise PlanError(f"{name}={extent!r} is not a positive whole number: give 1 or more")
        if self.num_stages % self.num_model_chunks:
            raise PlanError(
                f"{self.num_stages} stages cannot be dealt as {self.num_model_chunks} model chunks to each pipeline "
                f"rank: give a multiple of {self.num_model_chunks} stages"
            )

    def __str__(self) -> str:
        """The extents in words."""
        words = [
            f"{self.num_stages} stages",
            f"{self.num_micro_batches} micro-batches",
            f"{self.num_token_slices} token slices",
        ]
        if self.num_model_chunks > 1:
            words.append(f"{self.num_model_chunks} model chunks on each rank ({self.placement.value})")
        return ", ".join(words)

    def to_fields(self) -> dict[str, Any]:
        """The extents as JSON fields; those of model chunks only where there are several."""
        fields = asdict(self) | {"placement": self.placement.value}
        return fields if self.num_model_chunks > 1 else dict(islice(fields.items(), 3))

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> "PipelineShape":
        """Read what `to_fields` wrote, among other fields.

        Raises:
            KeyError, ValueError: if it is something else.
        """
        return cls(
            fields["num_stages"],
            fields["num_micro_batches"],
            fields["num_token_slices"],
            fields.get("num_model_chunks", 1),
            Placement(fields.get("placement", Placement.LOOPED)),
        )

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks: as many as stages, unless each owns several."""
        return self.num_stages // self.num_model_chunks

    def rank_of(self, stage: int) -> int:
        """Pipeline rank that owns a stage."""
        model_chunk, rank = divmod(stage, self.num_ranks)
        turned = self.placement is Placement.V and model_chunk % 2
        return self.num_ranks - 1 - rank if turned else rank

    def stages_of(self, rank: int) -> Iterator[int]:
        """Stages of a pipeline rank, first to last: one for each model chunk."""
        turned = self.num_ranks - 1 - rank if self.placement is Placement.V else rank
        for model_chunk in range(self.num_model_chunks):
            yield model_chunk * self.num_ranks + (turned if model_chunk % 2 else rank)

    @property
    def last_stage(self) -> int:
        """The stage that computes the loss."""
        return self.num_stages - 1

    @property
    def last_token_slice(self) -> int:
        """The token slice whose backward runs first."""
        return self.num_token_slices - 1
