"""Ops: the units of work that a schedule puts in order."""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from deepspeed_ext.plan.errors import PlanError


class OpKind(StrEnum):
    """What an op computes; the value is its letter in the text form."""

    FORWARD = "F"
    BACKWARD = "B"
    """The full backward: gradients of the input and of the weights."""


_TEXT_FORM = re.compile(r"(\d+)([A-Z]+)(\d+)\.(\d+)")


class Op(NamedTuple):
    """One forward or backward of one token slice of one micro-batch on one stage. Written `2F0.3`.

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
        """Read the text form back.

        Raises:
            PlanError: if the text has another form.
        """
        match = _TEXT_FORM.fullmatch(text.strip())
        if match is None or match[2] not in {kind.value for kind in OpKind}:
            kinds = " or ".join(kind.value for kind in OpKind)
            raise PlanError(
                f"op {text!r} is not written as stage, {kinds}, micro-batch, '.', token slice: write it as 2F0.3"
            )
        return cls(OpKind(match[2]), int(match[1]), int(match[3]), int(match[4]))


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """Extent of the pipeline: how many stages, micro-batches and token slices.

    Raises:
        PlanError: if an extent is not a positive whole number.
    """

    num_stages: int
    num_micro_batches: int
    num_token_slices: int = 1

    def __post_init__(self) -> None:
        """Check every extent."""
        for name in self.__slots__:
            extent = getattr(self, name)
            if not isinstance(extent, int) or extent < 1:
                raise PlanError(f"{name}={extent!r} is not a positive whole number: give 1 or more")

    @property
    def last_stage(self) -> int:
        """The stage that computes the loss."""
        return self.num_stages - 1

    @property
    def last_token_slice(self) -> int:
        """The token slice whose backward runs first."""
        return self.num_token_slices - 1
