"""Costs of ops and transfers: tables of times, given, read from a file, or computed from the share of attention.

A boundary is where two neighbouring stages meet: boundary i is between stage i and stage i + 1. Activations cross it
one way and their gradients, of the same size, the other way, each on a channel of its own.

    op of stage i    [F0.0][F0.1]
    channel                [==== 0.0 ====][==== 0.1 ====]        bytes / bandwidth each, one after the other
    at stage i + 1                        '--> 0.0      '--> 0.1    each a latency later

Sizes of tensors that attention computes at once are here because kernel and prices both read them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import inf
from operator import add
from typing import Any

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import Op, OpKind, PipelineShape
from deepspeed_ext.plan.text_files import parse_json

__all__ = ["OpCosts", "Table", "TransferCosts", "attention_costs"]

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
        """Read `{"latency": x, "bandwidth": y, "bytes": [per token slice]}`; `x` and `y` may be lists by boundary."""
        for name in _FIELDS:
            if name not in fields:
                raise PlanError(f"costs['transfer'] has no {name!r}: give latency, bandwidth and bytes, or one number")
        for name in fields:
            if name not in _FIELDS:
                raise PlanError(
                    f"costs['transfer'] has the unknown field {name!r}: the fields are {', '.join(_FIELDS)}"
                )

        counts = [(shape.last_stage, "stage boundaries")] * 2 + [(shape.num_token_slices, "token slices")]
        costs = cls(
            *(
                numbers(fields[name], *of, f"costs['transfer'][{name!r}]", "cannot be")
                for name, of in zip(_FIELDS, counts, strict=True)
            )
        )
        if not all(costs.bandwidth):
            raise PlanError("costs['transfer']['bandwidth'] is 0, and nothing would arrive: give more than 0")
        return costs


def at_least_zero(value: object, place: str, why_not: str) -> float:
    """Return a number of a file; `why_not` ends the error for one that is not finite or is below 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < inf:
        raise PlanError(f"{place} has the entry {value!r}, which {why_not}: give finite numbers >= 0")
    return float(value)


def numbers(value: object, count: int, things: str, place: str, why_not: str) -> tuple[float, ...]:
    """Return a number of a file for each of some things: as listed there, or one number for all."""
    entries = value if isinstance(value, list) else [value] * count
    if len(entries) != count:
        raise PlanError(f"{place} has {len(entries)} entries for {count} {things}: give one number, or one for each")
    return tuple(at_least_zero(entry, place, why_not) for entry in entries)


def _time(value: object, name: str) -> float:
    return at_least_zero(value, f"costs[{name!r}]", "is not a time")


Table = tuple[tuple[float, ...], ...]
"""A time per stage and token slice: `table[stage][token_slice]`."""

LEAST_SHARE = 1e-9
"""Time of an op that takes none, as a share of the longest op's, where ops are put in the order of their times."""


@dataclass(frozen=True, slots=True)
class OpCosts:
    """Times of the ops of one micro-batch, and of one transfer between neighbouring stages, in any one unit."""

    forward: Table
    """Time of a forward per stage and token slice."""
    backward: Table
    """Time of a backward per stage and token slice, but for the part in `weight_gradient`."""
    weight_gradient: Table | None = None
    """Time of weight gradients per stage and token slice; None where `backward` has them in it."""
    transfer: float | TransferCosts = 0.0
    """Time from the end of an op until its neighbour may start on the result, as one number: a latency, under which any
    number of messages can be on their way. Or in full: latency, bandwidth and bytes."""
    reductions: Table | None = None
    """Per stage, times to sum its gradients over data-parallel ranks, in pieces: the first is of the last layer, or
    the last few. None where there is but one replica."""

    @classmethod
    def uniform(
        cls,
        shape: PipelineShape,
        *,
        forward: float = 1.0,
        backward: float = 1.0,
        weight_gradient: float | None = None,
        transfer: float | TransferCosts = 0.0,
    ) -> "OpCosts":
        """Return costs in which every op of a kind takes the same time.

        Args:
            backward: time of a backward, or of its input gradient.
            weight_gradient: time of a weight gradient; None where backwards are whole.
        """

        def table(time: float) -> Table:
            return ((time,) * shape.num_token_slices,) * shape.num_stages

        apart = None if weight_gradient is None else table(weight_gradient)
        return cls(table(forward), table(backward), apart, transfer)

    def duration(self, op: Op) -> float:
        """Time of one op."""
        kind, stage, _, token_slice = op
        if kind is OpKind.FORWARD:
            return self.forward[stage][token_slice]
        if kind is OpKind.INPUT_GRADIENT:
            return self.backward[stage][token_slice]
        if self.weight_gradient is None:
            if kind is OpKind.BACKWARD:
                return self.backward[stage][token_slice]
            raise PlanError(
                f"op {op} computes weight gradients apart, and the costs have no weight_gradient: add that table, or "
                "choose a schedule that does not split the backward"
            )
        weight_gradient = self.weight_gradient[stage][token_slice]
        return weight_gradient + (self.backward[stage][token_slice] if kind is OpKind.BACKWARD else 0.0)

    def in_order(self) -> "OpCosts":
        """The same costs, in which all forwards and backwards take time, so that no op ends when it starts.

        Programs are lowered in the order of the times. Some ops take none: the last stage's forward, where the whole
        stage is computed in the backward. Such an op gets a billionth of the longest one.
        """
        longest = max(max(row) for table in (self.forward, self.backward) for row in table)
        least = LEAST_SHARE * longest if longest > 0 else 1.0

        def above_zero(table: Table) -> Table:
            return tuple(tuple(time if time > 0 else least for time in row) for row in table)

        if all(time > 0 for table in (self.forward, self.backward) for row in table for time in row):
            return self
        return replace(self, forward=above_zero(self.forward), backward=above_zero(self.backward))

    def durations(self, kind: OpKind) -> Table:
        """Times of all ops of one kind, by stage and token slice; see `duration`."""
        if kind is OpKind.BACKWARD and self.weight_gradient is not None:
            pairs = zip(self.weight_gradient, self.backward, strict=True)
            return tuple(tuple(map(add, *rows)) for rows in pairs)
        if kind is OpKind.FORWARD:
            return self.forward
        if kind is OpKind.WEIGHT_GRADIENT:
            self.duration(Op(kind, 0, 0, 0))  # is there such a table?
            assert self.weight_gradient is not None
            return self.weight_gradient
        return self.backward

    def latency(self, boundary: int) -> float:
        """Time that a message from stage `boundary` to the next, or back, travels after it has left."""
        return self.transfer.latency[boundary] if isinstance(self.transfer, TransferCosts) else self.transfer

    def sending_time(self, boundary: int, token_slice: int) -> float:
        """Return the time for which that message keeps its channel busy, so that the next must wait."""
        if isinstance(self.transfer, TransferCosts):
            return self.transfer.message_bytes[token_slice] / self.transfer.bandwidth[boundary]
        return 0.0

    @classmethod
    def from_json(cls, text: str, shape: PipelineShape) -> "OpCosts":
        """Read `{"forward": [[per stage][per token slice]], "backward": ..., ...}`; the form is in the command's help.

        `weight_gradient`, `transfer` and `reductions` may be left out. `transfer` is a number, or the object that
        `TransferCosts.from_fields` reads. `reductions` has a row of any length for each stage, of times by piece. With
        model chunks, rows are for stages; or for pipeline ranks, and then each stage takes its part of the time.
        """
        fields = parse_json(text, "the costs file")
        if not isinstance(fields, dict):
            raise PlanError(
                'costs are not a JSON object: write {"forward": [[...]], "backward": [[...]], "transfer": 0}'
            )
        unknown = fields.keys() - {"forward", "backward", "weight_gradient", "transfer", "reductions"}
        if unknown:
            raise PlanError(
                f"costs have the unknown field {min(unknown)!r}: "
                "the fields are forward, backward, weight_gradient, transfer and reductions"
            )
        forward, backward = (_table(fields, name, shape) for name in ("forward", "backward"))
        weight_gradient = _table(fields, "weight_gradient", shape) if "weight_gradient" in fields else None
        transfer = fields.get("transfer", 0.0)
        return cls(
            forward,
            backward,
            weight_gradient,
            TransferCosts.from_fields(transfer, shape) if isinstance(transfer, dict) else _time(transfer, "transfer"),
            _reductions(fields["reductions"], shape) if "reductions" in fields else None,
        )


def _table(fields: Mapping[str, Any], name: str, shape: PipelineShape) -> Table:
    rows = fields.get(name)
    if not isinstance(rows, list) or any(not isinstance(row, list) for row in rows):
        raise PlanError(f"costs[{name!r}] is not a list of lists: give one list of times for each stage")
    lengths = [len(row) for row in rows]
    if shape.num_model_chunks > 1 and lengths == [shape.num_token_slices] * shape.num_ranks:
        by_rank = [[_time(time, name) / shape.num_model_chunks for time in row] for row in rows]
        return tuple(tuple(by_rank[shape.rank_of(stage)]) for stage in range(shape.num_stages))
    if lengths != [shape.num_token_slices] * shape.num_stages:
        raise PlanError(
            f"costs[{name!r}] has rows of {lengths} times for {shape.num_stages} stages of {shape.num_token_slices} "
            "token slices: give one row for each stage and one time for each token slice"
        )
    return tuple(tuple(_time(time, name) for time in row) for row in rows)


def _reductions(rows: object, shape: PipelineShape) -> Table:
    if not isinstance(rows, list) or any(not isinstance(row, list) or not row for row in rows):
        raise PlanError("costs['reductions'] is not a list of lists: give the times of one or more pieces per stage")
    if len(rows) != shape.num_stages:
        raise PlanError(
            f"costs['reductions'] has {len(rows)} rows for {shape.num_stages} stages: give one row for each stage"
        )
    return tuple(tuple(_time(time, "reductions") for time in row) for row in rows)


def attention_costs(
    shape: PipelineShape,
    lengths: Sequence[float],
    attention_share: float,
    *,
    head_share: float = 0.0,
    window: float | None = None,
) -> OpCosts:
    """Costs of a pipeline with evenly spread layers, in forwards of one micro-batch on one pipeline rank.

    Attention of a token grows with the tokens before it, matrix products do not. With the whole sequence as 1 and token
    slice j as [start, end) of it:

    F  = (1 - rho) (end - start) +     rho (end^2 - start^2)
    BI = (1 - rho) (end - start) + 2 * rho (end^2 - start^2)        attention has two products to take back for each
    BW = (1 - rho) (end - start)                                    attention has no weights

    In a sliding window of w of the sequence, a token at x attends to min(x, w). The squares are then the integral of
    2 min(x, w), as a share of the integral over a whole sequence, so that rho stays the share of attention.

    Args:
        shape: of the pipeline. With V model chunks each stage takes 1/V of a rank's time.
        lengths: of the token slices, in tokens or in any other unit.
        attention_share: rho above, of a whole sequence, in [0, 1].
        head_share: time that the head adds to each of F, BI and BW of the last stage, for a whole sequence.
        window: sliding window of all layers, in the unit of the lengths; None = tokens attend to all before them.
    """
    shape.check_lengths(lengths)
    if not 0 <= attention_share <= 1:
        raise PlanError(f"attention share {attention_share} is not a share: give a number between 0 and 1")
    if not 0 <= head_share < inf:
        raise PlanError(f"head share {head_share} is not a share of a rank's forward: give 0 or more")
    if window is not None and not 0 < window < inf:
        raise PlanError(f"a window of {window} is none: give more than 0 tokens, or leave it out")
    whole = sum(lengths)
    reach = 1.0 if window is None else min(window / whole, 1.0)
    bounds = list(pairwise(length / whole for length in accumulate(lengths, initial=0.0)))

    def attended(end: float) -> float:
        """Positions that all tokens before `end` attend to, as a share of those in a whole sequence."""
        # The integral of min(x, reach) from 0 to `end`, twice.
        inside, beyond = min(end, reach), max(end - reach, 0.0)
        return (inside**2 + 2 * reach * beyond) / (reach**2 + 2 * reach * (1 - reach))

    def table(attention: float) -> Table:
        """Times of an op that does its matrix products once and its attention `attention` times."""
        linear = [end - start for start, end in bounds]
        squares = [attended(end) - attended(start) for start, end in bounds]
        layers = tuple(
            ((1 - attention_share) * tokens + attention * attention_share * square) / shape.num_model_chunks
            for tokens, square in zip(linear, squares, strict=True)
        )
        last = tuple(time + head_share * tokens for time, tokens in zip(layers, linear, strict=True))
        return (*[layers] * shape.last_stage, last)

    return OpCosts(table(1.0), table(2.0), table(0.0))


CHUNK_TOKENS = 64
"""Tokens of a chunk of linear attention: work inside a chunk grows with it, and the number of states in between
shrinks."""

SCORES_AT_ONCE = 2**27
"""Scores that exist at once, if a tile has more than one query: 512 MiB in fp32 for each tensor of their shape."""

EXPANDED_AT_ONCE = 2**27
"""Numbers of keys and values that are computed from latents at once: 256 MiB in bf16, and as much of gradients."""

SHORTEST_IN_WINDOW = 128
"""Queries of a tile in a narrow window: fewer at once would launch many small kernels."""


def longest_in_window(window: int) -> int:
    """Queries of a tile at most, in a sliding window of W tokens.

    A tile of n queries computes W - 1 + n scores for each of them, where W would do.
    """
    return max(window // 2, SHORTEST_IN_WINDOW)


def tile_length(
    num_queries: int, num_keys: int, heads: int, window: int | None, scores_at_once: int = SCORES_AT_ONCE
) -> int:
    """Queries of a tile, but for the last.

    Args:
        window: tokens that a token attends to, itself included; None for all before it.
    """
    longest, reached = num_queries, num_keys
    if window is not None:
        longest = min(num_queries, longest_in_window(window))
        reached = min(num_keys, window - 1 + longest)
    return min(longest, max(1, scores_at_once // (heads * reached)))
