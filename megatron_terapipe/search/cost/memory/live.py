"""Memory that a pipeline rank holds between the forwards and backwards of its schedule, and its peak.

The same accounting as `deepspeed_ext.plan.memory`, for the order of a rank instead of its times (between two ops of a
rank nothing comes or goes), and with what an op holds while it runs.
"""

from collections.abc import Sequence
from dataclasses import fields
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepspeed_ext.plan.dependencies import result
from deepspeed_ext.plan.ops import LIVE_CHANGE, Op, OpKind, PipelineShape
from deepspeed_ext.plan.programs.host_copies import HostCopy
from deepspeed_ext.plan.programs.program import Content
from deepspeed_ext.plan.schedules import KEEPING_ALL, SCHEDULES
from deepspeed_ext.plan.simulate.wiring import KINDS, OpColumns
from megatron_terapipe.search.cost.memory.activations import SCORE_LIMIT, LogitLimits, ScalarOrArray

Numbers = NDArray[np.float64]


class StageBytes(NamedTuple):
    """Bytes of one token of a micro-batch, one number for each stage of the whole pipeline."""

    activations: Numbers
    """Kept from forward to backward."""
    key_values: Numbers
    """Keys and values of all its layers."""
    key_value_gradients: Numbers
    """Their gradients."""
    logits: Numbers
    """Kept by head and loss."""
    working: Numbers
    """Held in addition by a backward while it runs."""
    freed: Numbers
    """Part of `activations` that a BI frees if the backward is in two parts; below zero if it leaves more."""
    scores: Numbers | float = 0.0
    """Held in addition to `working` by attention that is written out, `SCORE_LIMIT` at most."""
    window_gradients: Numbers | float = 0.0
    """Of a whole micro-batch, not of a token: gradients of keys and values in the reach of sliding windows, where
    sequences have several token slices."""
    head_working: Numbers | float = 0.0
    """`working` of the head, which is separate because it has a limit."""
    limits: LogitLimits = LogitLimits(inf, inf)
    """Of logits and of `head_working` on a rank, in bytes."""
    recomputed: Numbers | float = 0.0
    """Held by a backward while it runs, of all layers of its stage."""
    is_recomputed: bool = False
    """Whether stages are computed again: logits are there in the backward alone."""


class Held(NamedTuple):
    """Bytes at the moment of the peak; numbers, or arrays that broadcast against each other."""

    activations: ScalarOrArray
    key_values: ScalarOrArray
    logits: ScalarOrArray
    working: ScalarOrArray


MOST_OPS_AT_ONCE = 200_000
"""Ops of several ranks that are looked at together."""

_LIVE_CHANGE = np.array([LIVE_CHANGE[kind] for kind in KINDS])
_TURNS = np.array([result(Op(kind, 0, 0, 0)).kind is OpKind.INPUT_GRADIENT for kind in KINDS])
"""Which kinds of ops give the gradient of their input."""


def rank_order(schedule: str, shape: PipelineShape, rank: int) -> OpColumns:
    """Return the ops of a rank as arrays."""
    return OpColumns.of(list(SCHEDULES[schedule](shape, rank)))


def orders_of_ranks(schedule: str, shape: PipelineShape) -> list[OpColumns]:
    """Return the ops of all ranks as arrays of [ranks, ops], some ranks at a time, so that none is very large.

    Args:
        schedule: its name in `SCHEDULES`; every rank has as many ops.
    """
    orders = [rank_order(schedule, shape, rank) for rank in range(shape.num_ranks)]
    together = max(MOST_OPS_AT_ONCE // max(len(orders[0].kind), 1), 1)
    names = [field.name for field in fields(OpColumns)]
    return [
        OpColumns(*(np.stack([getattr(order, name) for order in orders[first : first + together]]) for name in names))
        for first in range(0, len(orders), together)
    ]


def steady_micro_batches(schedule: str, num_ranks: int, num_token_slices: int, num_micro_batches: int) -> int:
    """Smallest number of micro-batches with which every rank reaches the peak that it has with `num_micro_batches`.

    More of them only repeat the steady state; `gpipe` and `breadth-first`, which hold them all, have none.
    """
    if schedule in KEEPING_ALL:
        return num_micro_batches
    least = -(-num_ranks // num_token_slices)
    if schedule != "interleaved":
        return min(num_micro_batches, 2 * least + 2)
    # Its groups of micro-batches are all of one length here, that of its longest group.
    groups = max(num_micro_batches // least, 1)
    longest = -(-num_micro_batches // groups)
    enough = 4 * longest
    return enough if enough < num_micro_batches and enough // least == 4 else num_micro_batches


def peak_held(order: OpColumns, lengths: Sequence[int], of_stage: StageBytes, copies: Sequence[HostCopy] = ()) -> Held:
    """The most that ranks hold, by what it is: [...].

    Args:
        order: their ops, arrays of [..., ops].
        lengths: tokens of each token slice.
        of_stage: bytes of a token on each stage, micro-batch size included.
        copies: what the device lets go of for some time, where the order is that of one rank.
    """
    tokens = np.asarray(lengths, dtype=float)
    own = tokens[order.token_slice]
    change, is_turn = _LIVE_CHANGE[order.kind], _TURNS[order.kind]
    is_forward, is_last = change > 0, change < 0
    activations = own * of_stage.activations[order.stage]
    freed = own * of_stage.freed[order.stage]
    # What comes as an op starts, and what is gone when it has ended. The last op of a backward in two parts frees what
    # the first has left.
    comes = np.where(is_forward, activations, 0.0)
    goes = np.where(is_forward, 0.0, np.where(is_last, activations - np.where(is_turn, 0.0, freed), freed))
    held_activations = _during(comes, goes) - _on_host(copies, Content.INPUT, len(own.T))
    logits = own * of_stage.logits[order.stage]
    held_logits = np.where(is_turn, logits, 0.0)
    if not of_stage.is_recomputed:
        held_logits = _during(np.where(is_forward, logits, 0.0), held_logits)
    held_logits = np.minimum(held_logits, of_stage.limits.kept)
    first, last = order.token_slice == 0, order.token_slice == len(lengths) - 1
    sequence = tokens.sum() * of_stage.key_values[order.stage]
    of_token = of_stage.key_value_gradients[order.stage]
    in_reach = ((len(tokens) > 1) * of_stage.window_gradients * np.ones_like(of_stage.key_values))[order.stage]
    comes, goes = np.where(is_forward & first, sequence, 0.0), np.where(is_turn & first, sequence, 0.0)
    if any(copy.content is Content.KEYS_AND_VALUES for copy in copies):
        # Those of each token slice are apart, so that each can go by itself.
        of_own = own * of_stage.key_values[order.stage]
        comes, goes = np.where(is_forward, of_own, 0.0), np.where(is_turn, of_own, 0.0)
    comes = comes + np.where(is_turn & last, tokens[:-1].sum() * of_token + in_reach, 0.0)
    # The backward of a token slice frees the gradients of its own keys and values; the first that runs has none yet.
    goes = goes + np.where(is_turn & ~last, own * of_token, 0.0) + np.where(is_turn & first, in_reach, 0.0)
    held_key_values = _during(comes, goes) - _on_host(copies, Content.KEYS_AND_VALUES, len(own.T))
    of_head, of_scores, recomputed = (
        np.broadcast_to(each, of_stage.working.shape)[order.stage]
        for each in (of_stage.head_working, of_stage.scores, of_stage.recomputed)
    )
    of_blocks = own * of_stage.working[order.stage] + np.minimum(own * of_scores, SCORE_LIMIT)
    working = np.maximum(of_blocks, np.minimum(own * of_head, of_stage.limits.working))
    working = np.where(is_turn, working + own * recomputed, 0.0)
    at = np.argmax(held_activations + held_logits + held_key_values + working, axis=-1, keepdims=True)
    parts = held_activations, held_key_values, held_logits, working
    return Held(*(np.take_along_axis(part, at, axis=-1)[..., 0] for part in parts))


def _on_host(copies: Sequence[HostCopy], content: Content, num_ops: int) -> Numbers:
    """[ops] bytes that are on the host alone while each op runs."""
    changes = np.zeros(num_ops + 1)
    for copy in copies:
        if copy.content is content:
            changes[copy.drop] += copy.size
            changes[copy.fetch] -= copy.size
    return np.cumsum(changes[:-1])


def _during(comes: Numbers, goes: Numbers) -> Numbers:
    """[..., ops] amounts held while each op runs."""
    held = np.cumsum(comes, axis=-1)
    held[..., 1:] -= np.cumsum(goes, axis=-1)[..., :-1]
    return held
