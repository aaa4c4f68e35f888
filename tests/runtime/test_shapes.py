"""Shapes between stages: not sent if known, else sent once; changes are refused, unless shapes are dynamic."""

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.ops import OpKind, PipelineShape, Placement
from deepspeed_ext.plan.programs.lowering import lower
from deepspeed_ext.plan.programs.program import SEND
from deepspeed_ext.plan.schedules import forward_order, schedule_named
from deepspeed_ext.runtime.channels import Outgoing
from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from tests.distributed import run_distributed
from tests.runtime import models
from tests.runtime.reference import Reference
from tests.runtime.training import ROWS, Setup, build, feed

CUT = (9, 1, 8, 6)
SETUPS = {
    2: [
        Setup(pp=2, cut=CUT),
        Setup(pp=2, cut=CUT, schedule="interleaved", model_chunks=2, micro_batches=3),
        Setup(pp=2, cut=CUT, schedule="gpipe", model_chunks=2, placement=Placement.V),
    ],
    3: [
        Setup(pp=3, cut=(23, 1), schedule="interleaved", model_chunks=2, num_blocks=5),
        Setup(pp=3, cut=CUT, schedule="zero-bubble", recompute=1),
    ],
}
KNOWN, ONCE, DYNAMIC = {}, {"activation_spec": None}, {"activation_spec": None, "dynamic_shape": True}
"""Shapes known to both ends, sent once, and sent with each activation."""


def _launch(world_size: int) -> dict[str, Any]:
    """By setup and source of shapes, the tensors this rank sent in each of two steps, and then in two evaluations."""
    messages = [
        [_messages_of(setup, keywords) for keywords in (KNOWN, ONCE, DYNAMIC)] for setup in SETUPS.get(world_size, ())
    ]
    found: dict[str, Any] = {"messages": messages}
    if world_size == 2:
        # Last the error that ends a neighbour.
        found |= {"losses": _changing_rows(), "errors": _longer_sequence_and_more_rows()}
    return found


@cache
def launched(world_size: int) -> list[dict[str, Any]]:
    return run_distributed(_launch, world_size, world_size)


def _messages_of(setup: Setup, keywords: dict[str, Any]) -> list[int]:
    engine = build(setup, **keywords)
    sent = [_num_messages(engine)]
    for step, run in enumerate([engine.train_batch] * 2 + [engine.eval_batch] * 2):
        run(feed(engine, setup, step=step))
        sent.append(_num_messages(engine))
    return [after - before for before, after in pairwise(sent)]


def _num_messages(engine: TokenSlicePipelineEngine) -> int:
    """Tensors that this rank has sent to its neighbours, headers included."""
    return sum(end.num_messages for end in engine._links._ends.values() if isinstance(end, Outgoing))


def _transfers(setup: Setup, *, training: bool) -> list[tuple[int, int, int]]:
    """Per rank, the transfers of its program, the activations among them, and how many kinds of these there are."""
    shape = PipelineShape(
        setup.pp * setup.model_chunks,
        setup.micro_batches,
        len(setup.cut),
        setup.model_chunks,
        placement=setup.placement,
    )
    found = []
    for program in lower(schedule_named(setup.schedule) if training else forward_order, shape):
        sends = [each for each in program.instructions if each.kind in SEND.values()]
        activations = [each for each in sends if each.kind is SEND[OpKind.FORWARD]]
        kinds = {(each.stage, each.token_slice) for each in activations}
        found.append((len(sends), len(activations), len(kinds)))
    return found


@pytest.mark.parametrize("world_size", SETUPS)
def test_messages_are_the_transfers_of_the_program_and_headers(world_size: int) -> None:
    by_rank = [found["messages"] for found in launched(world_size)]
    for index, setup in enumerate(SETUPS[world_size]):
        training, evaluation = _transfers(setup, training=True), _transfers(setup, training=False)
        for rank, found in enumerate(of_rank[index] for of_rank in by_rank):
            sends, activations, kinds = training[rank]
            forward, forward_activations, forward_kinds = evaluation[rank]
            if setup.model_chunks == 1:
                # An activation of each token slice to the stage after, a gradient of each to the one before.
                units = setup.micro_batches * len(setup.cut)
                assert sends == units * ((rank < setup.pp - 1) + (rank > 0)), f"{setup} on rank {rank}"
                assert kinds == len(setup.cut) * (rank < setup.pp - 1), f"{setup} on rank {rank}"
            assert found == [
                [sends, sends, forward, forward],
                # Gradients have the shapes of their activations. Evaluation has shapes of its own.
                [sends + kinds, sends, forward + forward_kinds, forward],
                [sends + activations] * 2 + [forward + forward_activations] * 2,
            ], f"{setup} on rank {rank}"


# ---------------------------------------------------------------------- shapes that change (U8)


def _error_of(engine: Any, batch: list[Any]) -> str:
    """The error of this rank; empty if only its neighbour has ended."""
    try:
        engine.train_batch(iter(batch))
    except UserError as error:
        return str(error)
    except RuntimeError:
        return ""
    return "no error"


CHANGED = (
    "activations changed from [2, 9, 16] float32 to [3, 9, 16] float32: keep one shape, build the module with "
    "dynamic_shape=True, or call reset_activation_shape() on every rank before the change"
)


def _longer_sequence_and_more_rows() -> list[str]:
    setup = Setup(pp=2, cut=CUT)
    engine = build(setup, **ONCE)
    engine.train_batch(feed(engine, setup))
    batches = models.batches(2, ROWS, seq=models.SEQ - 2), models.batches(2, ROWS + 1)
    return [_error_of(engine, batch) for batch in batches]


def test_another_shape_is_refused_by_the_stage_that_sends() -> None:
    (truncated, sender), (also_truncated, receiver) = (found["errors"] for found in launched(2))
    assert truncated == also_truncated
    assert "inputs of shape (2, 22)" in truncated and "24 tokens of the token slices 9,1,8,6" in truncated
    assert (sender, receiver) == (CHANGED, "")


def _still(setup: Setup, **keywords: Any) -> Any:
    return build(setup, **ONCE, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0), **keywords)


def _rows(*rows: int) -> list[Any]:
    """Micro-batches of some rows each."""
    return [batch for each in rows for batch in models.batches(1, each, seed=each)]


def _changing_rows() -> list[float]:
    """Losses when micro-batches change size: within a step if dynamic, else between steps, after a reset."""
    engine = _still(Setup(pp=2, cut=CUT), dynamic_shape=True)
    found = [engine.train_batch(iter(_rows(*rows))).item() for rows in ((2, 4), (1, 3))]
    # Four stages on two ranks.
    engine = _still(Setup(pp=2, cut=CUT, schedule="interleaved", model_chunks=2), dynamic_shape=True)
    found += [engine.train_batch(iter(_rows(2, 4))).item(), engine.eval_batch(iter(_rows(1, 3))).item()]
    engine = _still(Setup(pp=2, cut=CUT))
    for rows in (2, 1):
        engine.reset_activation_shape()
        found.append(engine.train_batch(iter(models.batches(2, rows, seed=rows))).item())
    return found


def _whole(batches: list[Any]) -> float:
    model = Reference(4, tied=True)
    with torch.no_grad():
        return sum(models.loss_fn(model(tokens), labels).item() for tokens, labels in batches) / len(batches)


def test_dynamic_shapes_change_within_a_step_and_others_after_a_reset() -> None:
    dynamic = [_whole(_rows(2, 4)), _whole(_rows(1, 3))]
    expected = [*dynamic, *dynamic, *(_whole(models.batches(2, rows, seed=rows)) for rows in (2, 1))]
    for found in launched(2):
        assert found["losses"] == pytest.approx(expected, rel=1e-6)
