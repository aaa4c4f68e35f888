"""Ops: the units of work that a schedule puts in order, the dependencies between them, and how many can be planned.

The data flow is stated once, in `DEPENDENCIES`; the simulators, the lowering, the optimiser and the critical path read
it.

    stage i - 1 |  F ------.                 .---> B or BI
    stage i     |          '-> F ... B or BI-'     BW
                                     |             ^
                                     '-- of BI ----'      time to the right

Token slices of a micro-batch on one stage: F of the first to the last, then B (or BI) of the last to the first.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import islice
from math import inf
from types import MappingProxyType
from typing import Any, NamedTuple

from deepspeed_ext.plan.errors import PlanError

__all__ = [
    "DEPENDENCIES",
    "LIVE_CHANGE",
    "Dependency",
    "Op",
    "OpKind",
    "PipelineShape",
    "Placement",
    "prerequisites",
    "reader_of",
    "reading_stage",
    "reads_of",
    "received",
    "result",
]


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
weight gradients read tensors of the forward."""

_TEXT_FORM = re.compile(r"([0-9]{1,9})([A-Z]+)([0-9]{1,9})(?:\.([0-9]{1,9}))?")
_KINDS = {kind.value: kind for kind in OpKind} | {"I": OpKind.INPUT_GRADIENT, "W": OpKind.WEIGHT_GRADIENT}
"""Kinds by their letters; `I` and `W` are letters of torch.distributed.pipelining."""


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
        return f"{self.stage}{self.kind.value}{self.micro_batch}.{self.token_slice}"

    @classmethod
    def parse(cls, text: str) -> "Op":
        """Read the text form back. The token slice may be left out where there is but one: `2F0`."""
        match = _TEXT_FORM.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None or match[2] not in _KINDS:
            kinds = " or ".join(kind.value for kind in OpKind)
            raise PlanError(
                f"op {text!r} is not written as stage, {kinds}, micro-batch, '.', token slice: write it as 2F0.3"
            )
        return cls(_KINDS[match[2]], int(match[1]), int(match[3]), int(match[4] or 0))


class Placement(StrEnum):
    """The pipeline rank of each stage, where a rank owns several.

    With four stages on two ranks:

    looped    rank 0: stages 0 2      rank 1: stages 1 3
    v         rank 0: stages 0 3      rank 1: stages 1 2
    """

    LOOPED = "looped"
    """Rank = stage modulo the number of ranks, as in Megatron's interleaving."""
    V = "v"
    """The stages fold back, so that the loss is where the tokens are (arXiv 2405.15362)."""


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """Extent of the pipeline: stages, micro-batches and token slices, and the ranks of the stages.

    Example:
        >>> shape = PipelineShape(num_stages=8, num_micro_batches=4, num_model_chunks=2)
        >>> shape.num_ranks, shape.rank_of(5), list(shape.stages_of(1))
        (4, 1, [1, 5])
    """

    num_stages: int
    num_micro_batches: int
    num_token_slices: int = 1
    num_model_chunks: int = 1
    """Stages that each pipeline rank owns."""
    placement: Placement = Placement.LOOPED

    def __post_init__(self) -> None:
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
        words = ", ".join(self.extents)
        return words if self.num_model_chunks == 1 else f"{words}, placement {self.placement.value}"

    @property
    def extents(self) -> list[str]:
        """The extents in words: `4 stages on 2 ranks`, `1 micro-batch`, `8 token slices`."""

        def counted(number: int, noun: str, plural: str = "s") -> str:
            return f"{number} {noun}{plural if number > 1 else ''}"

        ranks = f" on {counted(self.num_ranks, 'rank')}" if self.num_model_chunks > 1 else ""
        return [
            counted(self.num_stages, "stage") + ranks,
            counted(self.num_micro_batches, "micro-batch", "es"),
            counted(self.num_token_slices, "token slice"),
        ]

    def to_fields(self) -> dict[str, Any]:
        """The extents as JSON fields; omits model chunks where there is one."""
        fields = asdict(self) | {"placement": self.placement.value}
        return fields if self.num_model_chunks > 1 else dict(islice(fields.items(), 3))

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> "PipelineShape":
        """Read the fields of `to_fields`, among others.

        Raises:
            KeyError, ValueError: if they are missing or have other values.
        """
        return cls(
            fields["num_stages"],
            fields["num_micro_batches"],
            fields["num_token_slices"],
            fields.get("num_model_chunks", 1),
            Placement(fields.get("placement", Placement.LOOPED)),
        )

    def check_lengths(self, lengths: Sequence[float]) -> None:
        """Check that there is a length, or a share of the sequence, for each token slice."""
        if len(lengths) != self.num_token_slices or not all(0 < length < inf for length in lengths):
            raise PlanError(
                f"lengths {list(lengths)} for {self.num_token_slices} token slices: give one above 0 for each of them"
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
        """The token slice that runs its backward first."""
        return self.num_token_slices - 1


class Dependency(NamedTuple):
    """An op of kind `op` reads a result of kind `needed`, so far away. One outside the pipeline is not needed."""

    op: OpKind
    needed: OpKind
    stage: int = 0
    token_slice: int = 0


_ACTIVATION = OpKind.FORWARD
_GRADIENT = OpKind.INPUT_GRADIENT
"""Kind of a result: an activation, or the gradient of one, whether the op that gives it is a BI or a whole B."""

DEPENDENCIES = (
    # The activation of the stage before, and the keys and values of the token slice before.
    Dependency(OpKind.FORWARD, _ACTIVATION, stage=-1),
    Dependency(OpKind.FORWARD, _ACTIVATION, token_slice=-1),
    # Its own graph, the gradient of its activation, and that of its keys and values from the token slice after.
    *(
        dependency
        for backward in (OpKind.BACKWARD, OpKind.INPUT_GRADIENT)
        for dependency in (
            Dependency(backward, _ACTIVATION),
            Dependency(backward, _GRADIENT, stage=+1),
            Dependency(backward, _GRADIENT, token_slice=+1),
        )
    ),
    Dependency(OpKind.WEIGHT_GRADIENT, _GRADIENT),
)
"""The data flow as a table, which all that puts ops in order or times them reads."""

_BY_KIND = {kind: [dependency for dependency in DEPENDENCIES if dependency.op is kind] for kind in OpKind}
_RECEIVED = {dependency.op: dependency for dependency in DEPENDENCIES if dependency.stage}
"""Result of another stage that an op reads: one thing at most, since stages form a chain."""
_WAY = {dependency.needed: -dependency.stage for dependency in _RECEIVED.values()}
"""Where the stage is that reads a result of its neighbour, by the kind of the result."""


def reads_of(kind: OpKind) -> tuple[Dependency, ...]:
    """Return the rows of the table for ops of one kind, of which simulators and searches make their arrays."""
    return tuple(_BY_KIND[kind])


def result(op: Op) -> Op:
    """Return the result of an op, named as the op that gives no more: of a whole backward, its input gradient."""
    return Op(_GRADIENT, *op[1:]) if op.kind is OpKind.BACKWARD else op


def parts(op: Op) -> tuple[Op, ...]:
    """Return the parts that an op computes: of a whole backward, both halves; of any other op, itself."""
    if op.kind is not OpKind.BACKWARD:
        return (op,)
    return Op(OpKind.INPUT_GRADIENT, *op[1:]), Op(OpKind.WEIGHT_GRADIENT, *op[1:])


def reading_stage(given: Op, shape: PipelineShape) -> int | None:
    """Return the neighbouring stage that reads a result; None if there is none."""
    way = _WAY.get(given.kind)
    return None if way is None or not 0 <= given.stage + way < shape.num_stages else given.stage + way


def reader_of(given: Op, shape: PipelineShape) -> Op | None:
    """Return the op that reads a result, as a forward or an input gradient; None if no other stage reads it."""
    stage = reading_stage(given, shape)
    return None if stage is None else Op(given.kind, stage, given.micro_batch, given.token_slice)


def prerequisites(op: Op, shape: PipelineShape) -> tuple[Op, ...]:
    """Return the results that an op reads, as `result` names them."""
    kind, stage, micro_batch, token_slice = op
    num_stages, num_token_slices = shape.num_stages, shape.num_token_slices
    needed = []
    for _, of_kind, stages, token_slices in _BY_KIND[kind]:
        if 0 <= stage + stages < num_stages and 0 <= token_slice + token_slices < num_token_slices:
            needed.append(Op(of_kind, stage + stages, micro_batch, token_slice + token_slices))
    return tuple(needed)


def received(op: Op, shape: PipelineShape) -> Op | None:
    """Return the result of another stage that an op reads; None if it reads none."""
    dependency = _RECEIVED.get(op.kind)
    if dependency is None or not 0 <= op.stage + dependency.stage < shape.num_stages:
        return None
    return Op(dependency.needed, op.stage + dependency.stage, op.micro_batch, op.token_slice)


MOST_OPS = 2**25
"""Ops of a step on all ranks. The simulator takes 2 us and 150 bytes for each: a minute and 5 GB for so many."""

MOST_OPS_OF_RANK = 2**20
"""Ops of a step on one rank. Its program takes 50 us and 2.5 kB for each: a minute and 3 GB for so many."""


_US_PER_OP = 2

_SLOW_OPS = 2**21
"""With more ops than this, planning takes long enough for a message."""


def num_ops(shape: PipelineShape) -> int:
    """Forwards and backwards of a step on all ranks."""
    return 2 * shape.num_stages * shape.num_micro_batches * shape.num_token_slices


def slow_planning(shape: PipelineShape) -> str | None:
    """Return a line about the time that planning a step takes; None if it is short."""
    count = num_ops(shape)
    if count <= _SLOW_OPS:
        return None
    return f"planning a step of {count:,} forwards and backwards takes about {count * _US_PER_OP / 1e6:.0f} s"


def check_num_ops(shape: PipelineShape, most: int = MOST_OPS) -> None:
    """Check that a step has no more ops than can be planned, without planning it."""
    every = num_ops(shape)
    of_rank = every // shape.num_ranks
    if every <= most and of_rank <= MOST_OPS_OF_RANK:
        return
    count, limit, where = (every, most, "") if every > most else (of_rank, MOST_OPS_OF_RANK, " on each rank")
    raise PlanError(
        f"stages {shape.num_stages} x micro-batches {shape.num_micro_batches} x token slices {shape.num_token_slices} "
        f"make a step of {count:,} forwards and backwards{where}, more than the {limit:,} that can be planned: give "
        "larger micro-batches, a smaller batch, or fewer token slices"
    )
