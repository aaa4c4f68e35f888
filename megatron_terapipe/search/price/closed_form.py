"""The time of a pipeline in closed form, and bounds that no order of its ops beats; arguments broadcast.

P pipeline ranks, M micro-batches, S token slices, V model chunks. A rank's *total* is the time of all its ops of one
micro-batch. The slowest rank works all the time but for the ops of one token slice on one stage of every other rank,
which it waits for while the pipeline fills and drains:

    time = M * total of the slowest + (sum of the totals of the others) / (S V)

With equal ranks that is SC'21's bubble (arXiv 2104.04473 section 2.2), (P - 1)/(V M S + P - 1). `zero-bubble` fills
its drain with weight gradients: of each other rank F + BI - BW remain (arXiv 2401.10241 section 3, ZB-H1).
"""

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.price.layer_times import ScalarOrArray
from megatron_terapipe.search.price.stages import StageOps

Floats = NDArray[np.float64]


def pipeline_time(
    schedule: str,
    *,
    num_micro_batches: ScalarOrArray,
    num_token_slices: ScalarOrArray,
    num_model_chunks: ScalarOrArray,
    slowest: StageOps,
    others: StageOps,
    latency_s: ScalarOrArray = 0.0,
    activation_limit: ScalarOrArray = 1.0,
) -> ScalarOrArray:
    """Seconds of one iteration's ops, in closed form; arguments broadcast.

    Args:
        slowest: ops of one micro-batch on the slowest rank, all its stages and token slices.
        others: the same, added up over all other ranks.
        activation_limit: of `zero-bubble`: activations that a rank may hold, as a multiple of 1F1B's peak. With twice
            as many, weight gradients of two ranks' worth fill the drain (the same paper, ZB-H2: F + BI - 2 BW); then
            ranks start the next iteration one after the other, as they end this one.
    """
    total = total_s(schedule, slowest)
    waits = others.forward + others.backward
    if schedule == "zero-bubble":
        filling = activation_limit * others.weight_gradient
        waits = np.maximum(others.forward + others.input_gradient - filling, 0.0)
    return num_micro_batches * total + waits / (num_token_slices * num_model_chunks) + latency_s


def slowest_rank_and_rest(schedule: str, ops: Floats, multiplicity: Floats | None = None) -> tuple[StageOps, StageOps]:
    """Return the ops of the slowest rank, and of all others added up.

    Args:
        ops: [parts of `StageOps`, rows, ...] seconds of one micro-batch on each rank.
        multiplicity: [rows] number of ranks in each row; None = one each.
    """
    totals = np.asarray(total_s(schedule, StageOps(*ops)))
    slowest = np.take_along_axis(ops, np.argmax(totals, axis=0)[None, None], axis=1)[:, 0]
    everything = ops.sum(axis=1) if multiplicity is None else np.tensordot(ops, multiplicity, axes=([1], [0]))
    return StageOps(*slowest), StageOps(*(everything - slowest))


def total_s(schedule: str, ops: StageOps) -> ScalarOrArray:
    """Seconds of all ops of a rank, with the backward in one op or in two, as the schedule has it; ops broadcast."""
    backward = ops.input_gradient + ops.weight_gradient if schedule == "zero-bubble" else ops.backward
    return ops.forward + backward


def lower_bound(
    schedule: str, *, num_micro_batches: ScalarOrArray, ops: StageOps, before: StageOps, deferred_s: ScalarOrArray = 0.0
) -> ScalarOrArray:
    """Seconds of an iteration that no costs of the other ranks' ops make shorter; arguments broadcast.

    A rank runs all its ops. Its first one starts when the first token slice has passed the stages before it, and when
    its last backward is done, that token slice must go back through them. The same holds for a single stage of a rank.

    Args:
        before: of the first token slice on the stages that it passes before the rank, messages included.
        deferred_s: of `zero-bubble`: weight gradients of the rank that are still to do after its last input gradient,
            at most.
    """
    if schedule != "zero-bubble":
        return before.forward + num_micro_batches * total_s(schedule, ops) + before.backward
    ahead = np.maximum(num_micro_batches * ops.weight_gradient - deferred_s, 0.0)
    turning = num_micro_batches * (ops.forward + ops.input_gradient) + ahead + before.input_gradient
    return before.forward + np.maximum(turning, num_micro_batches * total_s(schedule, ops))


def round_trip_bound(
    schedule: str,
    *,
    num_ranks: int,
    num_micro_batches: Floats,
    num_token_slices: Floats,
    filling_s: ScalarOrArray,
    forward_s: ScalarOrArray,
    backward_s: ScalarOrArray,
    last: StageOps,
    draining_s: ScalarOrArray,
    deferred_s: ScalarOrArray = 0.0,
) -> ScalarOrArray:
    """Seconds that `1f1b` and `zero-bubble` take because the first rank waits for token slices to come back.

    The first rank runs P - 2 + S forwards ahead; from there on forward u + P follows the backward that answers forward
    u, the last one of its micro-batch (`plan.schedules`: `one_f_one_b`, `zero_bubble`). So every ceil(P / S)
    micro-batches a token slice passes all ranks both ways, one after the other. When the last of these turns, the last
    rank still has the rest to do.

    Args:
        num_micro_batches: M, an array [...].
        num_token_slices: S, an array [...] that broadcasts, as all that follow.
        filling_s: forwards of all token slices of a micro-batch but the last on the first rank.
        forward_s: forwards of the last token slice on all ranks, messages included.
        backward_s: its backwards, or input gradients, on all ranks, messages included.
        last: ops of one micro-batch on the last rank.
        draining_s: backwards, or input gradients, of the first token slice on all ranks but the last, with messages.
        deferred_s: as `lower_bound` has it, of the last rank.
    """
    waited = (num_micro_batches - 1) // np.ceil(num_ranks / num_token_slices)
    passed = waited * np.ceil(num_ranks / num_token_slices)
    turning = last.input_gradient if schedule == "zero-bubble" else last.backward
    rest = (num_micro_batches - passed) * turning + (num_micro_batches - passed - 1) * last.forward
    if schedule == "zero-bubble":
        rest = rest + np.maximum((num_micro_batches - passed) * last.weight_gradient - deferred_s, 0.0)
    return filling_s + waited * (forward_s + backward_s) + forward_s + rest + draining_s
