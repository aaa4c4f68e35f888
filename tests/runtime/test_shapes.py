"""Shapes between stages: never sent when known, sent once when not, and never guessed when they change."""

from typing import Any

import pytest
import torch

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.ops import OpKind, PipelineShape, Placement
from deepspeed_ext.plan.programs.lowering import lower
from deepspeed_ext.plan.programs.program import SEND
from deepspeed_ext.plan.schedules import forward_order, schedule_named
from tests.distributed import run_distributed
from tests.runtime import models
from tests.runtime.reference import Reference
from tests.runtime.training import ROWS, Setup, batches_of, build, feed

CUT = (9, 1, 8, 6)


def _messages(setup: Setup, keywords: dict[str, Any]) -> list[int]:
    """Tensors this rank sent in each of three steps, and then in an evaluation."""
    engine = build(setup, **keywords)
    sent = []
    for step in range(3):
        before = engine.num_messages
        engine.train_batch(feed(engine, setup, step=step))
        sent.append(engine.num_messages - before)
    before = engine.num_messages
    engine.eval_batch(feed(engine, setup))
    return [*sent, engine.num_messages - before]


def _sends(setup: Setup, *, training: bool) -> list[int]:
    """Per stage: an activation of each token slice to the stage after, a gradient of each to the one before."""
    units = setup.micro_batches * len(setup.cut)
    return [units * ((stage < setup.pp - 1) + training * (stage > 0)) for stage in range(setup.pp)]


@pytest.mark.parametrize("setup", [Setup(pp=2, cut=CUT), Setup(pp=4, cut=CUT, micro_batches=3)], ids=str)
def test_nothing_but_tensors_is_sent_when_shapes_are_known(setup: Setup) -> None:
    by_rank = run_distributed(_messages, setup.pp, setup, {})
    for stage, found in enumerate(by_rank):
        training, evaluation = _sends(setup, training=True)[stage], _sends(setup, training=False)[stage]
        assert found == [training, training, training, evaluation]


@pytest.mark.parametrize("setup", [Setup(pp=2, cut=CUT), Setup(pp=4, cut=CUT, micro_batches=3)], ids=str)
def test_headers_are_sent_in_the_first_step_alone(setup: Setup) -> None:
    by_rank = run_distributed(_messages, setup.pp, setup, {"activation_spec": None})
    for stage, found in enumerate(by_rank):
        training, evaluation = _sends(setup, training=True)[stage], _sends(setup, training=False)[stage]
        # One a token slice; gradients have the shapes of their activations. Evaluation has shapes of its own.
        headers = len(setup.cut) * (stage < setup.pp - 1)
        assert found == [training + headers, training, training, evaluation + headers]


SCHEDULED = [
    Setup(pp=2, cut=CUT, schedule="gpipe"),
    Setup(pp=2, cut=CUT, schedule="zero-bubble", micro_batches=3),
    Setup(pp=2, cut=CUT, schedule="interleaved", model_chunks=2, micro_batches=3),
    Setup(pp=2, cut=CUT, schedule="gpipe", model_chunks=2, placement=Placement.V),
    Setup(pp=3, cut=(23, 1), schedule="interleaved", model_chunks=2, num_blocks=5),
    Setup(pp=3, cut=CUT, schedule="zero-bubble", recompute=1),
]


def _transfers(setup: Setup, *, training: bool) -> list[tuple[int, int]]:
    """Per rank, the transfers of its program, and how many of the activations among them are of a kind of their own."""
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
        found.append((len(sends), len({(each.stage, each.token_slice) for each in activations})))
    return found


@pytest.mark.parametrize("known", [True, False], ids=["shapes known", "shapes sent once"])
@pytest.mark.parametrize("setup", SCHEDULED, ids=str)
def test_messages_are_the_transfers_of_the_program(setup: Setup, known: bool) -> None:
    by_rank = run_distributed(_messages, setup.pp, setup, {} if known else {"activation_spec": None})
    training, evaluation = _transfers(setup, training=True), _transfers(setup, training=False)
    for found, (sends, kinds), (sends_forward, kinds_forward) in zip(by_rank, training, evaluation, strict=True):
        headers, headers_forward = (0, 0) if known else (kinds, kinds_forward)
        assert found == [sends + headers, sends, sends, sends_forward + headers_forward]


def test_dynamic_shapes_are_sent_with_every_activation() -> None:
    setup = Setup(pp=2, cut=CUT)
    by_rank = run_distributed(_messages, 2, setup, {"activation_spec": None, "dynamic_shape": True})
    units = setup.micro_batches * len(CUT)
    assert by_rank == [[2 * units] * 4, [units] * 3 + [0]]


# ---------------------------------------------------------------------- shapes that change (U8)


def _error_of(engine: Any, batch: list[Any]) -> str:
    """What this rank's user reads; empty if it saw no more than its neighbour go."""
    try:
        engine.train_batch(iter(batch))
    except UserError as error:
        return str(error)
    except RuntimeError:
        return ""
    return "nothing was raised"


def _longer_sequence() -> list[str]:
    setup = Setup(pp=2, cut=CUT)
    engine = build(setup)
    engine.train_batch(feed(engine, setup))
    return [_error_of(engine, models.batches(2, ROWS, seq=seq)) for seq in (models.SEQ - 2,)]


def test_a_sequence_of_another_length_is_refused_and_not_truncated() -> None:
    for (message,) in run_distributed(_longer_sequence, 2):
        assert message == (
            "inputs of shape (2, 22) do not have the 24 tokens of the token slices 9,1,8,6 in dimension 1: "
            "feed sequences of that length, or change the token slices"
        )


def _more_rows(keywords: dict[str, Any]) -> str:
    setup = Setup(pp=2, cut=CUT)
    engine = build(setup, **keywords)
    engine.train_batch(feed(engine, setup))
    return _error_of(engine, models.batches(2, ROWS + 1))


@pytest.mark.parametrize("keywords", [{}, {"activation_spec": None}], ids=["shapes known", "shapes sent once"])
def test_another_micro_batch_size_is_refused_by_the_stage_that_sends(keywords: dict[str, Any]) -> None:
    sender, receiver = run_distributed(_more_rows, 2, keywords)
    assert sender == (
        "activations changed from [2, 9, 16] float32 to [3, 9, 16] float32: keep one shape, build the module with "
        "dynamic_shape=True, or call reset_activation_shape() on every rank before the change"
    )
    assert receiver == ""


ROWS_IN_TURN = (2, 4, 1, 3)


def _changing_rows(dynamic: bool) -> list[float]:
    """Losses when micro-batches change size: within a step if dynamic, else between steps, after a reset."""
    setup = Setup(pp=2, cut=CUT)
    engine = build(
        setup,
        activation_spec=None,
        dynamic_shape=dynamic,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
    )
    found = []
    for first, second in (ROWS_IN_TURN[:2], ROWS_IN_TURN[2:]):
        if dynamic:
            batch = models.batches(1, first, seed=first) + models.batches(1, second, seed=second)
            found.append(engine.train_batch(iter(batch)).item())
        else:
            engine.reset_activation_shape()
            found.append(engine.train_batch(iter(models.batches(2, first, seed=first))).item())
    return found


def _whole(batches: list[Any]) -> float:
    model = Reference(4, tied=True)
    with torch.no_grad():
        return sum(models.loss_fn(model(tokens), labels).item() for tokens, labels in batches) / len(batches)


def test_dynamic_shapes_may_change_within_a_step() -> None:
    expected = [
        _whole(models.batches(1, first, seed=first) + models.batches(1, second, seed=second))
        for first, second in (ROWS_IN_TURN[:2], ROWS_IN_TURN[2:])
    ]
    for found in run_distributed(_changing_rows, 2, True):
        assert found == pytest.approx(expected, rel=1e-6)


def _changing_rows_interleaved() -> list[float]:
    """Two micro-batches of a step, of different rows, on four stages of two ranks; then an evaluation of others."""
    setup = Setup(pp=2, cut=CUT, schedule="interleaved", model_chunks=2)
    engine = build(
        setup,
        activation_spec=None,
        dynamic_shape=True,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
    )
    trained = engine.train_batch(iter(models.batches(1, 2, seed=2) + models.batches(1, 4, seed=4)))
    evaluated = engine.eval_batch(iter(models.batches(1, 1, seed=1) + models.batches(1, 3, seed=3)))
    return [trained.item(), evaluated.item()]


def test_dynamic_shapes_reach_every_model_chunk() -> None:
    expected = [
        _whole(models.batches(1, first, seed=first) + models.batches(1, second, seed=second))
        for first, second in ((2, 4), (1, 3))
    ]
    for found in run_distributed(_changing_rows_interleaved, 2):
        assert found == pytest.approx(expected, rel=1e-6)


def test_shapes_may_change_between_steps_after_a_reset() -> None:
    expected = [_whole(models.batches(2, rows, seed=rows)) for rows in (ROWS_IN_TURN[0], ROWS_IN_TURN[2])]
    for found in run_distributed(_changing_rows, 2, False):
        assert found == pytest.approx(expected, rel=1e-6)


# ---------------------------------------------------------------------- data that ends


def _short_of_data() -> str:
    setup = Setup(pp=1, cut=CUT)
    return _error_of(build(setup), batches_of(setup, 0)[:1])


def test_an_iterator_that_ends_is_named() -> None:
    (message,) = run_distributed(_short_of_data, 1)
    assert message.startswith("the data iterator ended at micro-batch 1 of a batch of 2")


# ---------------------------------------------------------------------- losses that depend on nothing


def constant_at_first(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Counts no token of the first token slice."""
    return torch.zeros(()) if logits.shape[1] == CUT[0] else models.loss_fn(logits, labels)


def _constant_loss() -> str:
    setup = Setup(cut=CUT)
    return _error_of(build(setup, loss_fn=constant_at_first), batches_of(setup, 0))


def test_a_loss_without_a_graph_is_refused() -> None:
    # Without backward of the first token slice, its keys and values would lose what later ones found for them.
    (message,) = run_distributed(_constant_loss, 1)
    assert message.startswith("the loss of token slice 0 depends on no weight")
    assert "\n" not in message
