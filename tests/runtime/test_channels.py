"""Messages between two ranks: order, headers, shapes, and gradients that are asked for or not."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.runtime.channels import Incoming, Outgoing, ShapeBook, TensorSpec, _header, _read_header
from tests.distributed import run_distributed

HIDDEN = TensorSpec((2, 3), torch.float32, True)
MASK = TensorSpec((2,), torch.bool, False)


def test_a_rule_is_asked_once_and_again_after_clearing() -> None:
    asked = []
    book = ShapeBook(lambda kind: asked.append(kind) or (HIDDEN,))
    assert book.find("a") == book.find("a") == (HIDDEN,)
    assert asked == ["a"]
    book.clear()
    book.find("a")
    assert asked == ["a", "a"]


def test_without_a_rule_a_book_knows_what_it_learned() -> None:
    book = ShapeBook()
    assert book.find("a") is None
    book.note("a", (HIDDEN, MASK))
    book.note("a", (HIDDEN, MASK))
    assert book.find("a") == (HIDDEN, MASK)
    assert book.find("b") is None


@pytest.mark.parametrize(
    "changed",
    [(HIDDEN._replace(shape=(2, 4)),), (HIDDEN._replace(dtype=torch.float64),), (HIDDEN, MASK)],
    ids=["shape", "dtype", "count"],
)
def test_a_change_is_refused_with_both_shapes_and_the_remedy(changed: tuple[TensorSpec, ...]) -> None:
    book = ShapeBook()
    book.note("a", (HIDDEN,))
    with pytest.raises(UserError) as refused:
        book.note("a", changed)
    message = str(refused.value)
    assert "from [2, 3] float32 to" in message
    assert "dynamic_shape=True" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "spec",
    [
        (),
        (HIDDEN,),
        (HIDDEN, MASK, TensorSpec((), torch.int64, False)),
        tuple(TensorSpec((7, index), torch.bfloat16, index % 2 == 0) for index in range(20)),
    ],
)
def test_a_header_reads_back(spec: tuple[TensorSpec, ...]) -> None:
    assert _read_header(_header(spec)) == spec


def test_too_many_tensors_for_a_header_are_refused() -> None:
    with pytest.raises(UserError, match="pass fewer tensors, or give the module an activation_spec"):
        _header((HIDDEN,) * 60)


def _tensors(index: int) -> tuple[torch.Tensor, ...]:
    return torch.full((2, 3 + index % 2), float(index)).requires_grad_(), torch.arange(index % 2 + 1)


def _exchange(known: bool) -> dict[str, Any]:
    """Rank 0 sends four messages of two kinds; rank 1 expects them all before it waits for any."""
    group = dist.group.WORLD
    rule = (lambda kind: tuple(TensorSpec.of(tensor) for tensor in _tensors(kind))) if known else None
    shapes = ShapeBook(rule)
    if dist.get_rank() == 0:
        outgoing = Outgoing(1, group, shapes)
        for index in range(4):
            outgoing.send(index, index % 2, _tensors(index))
        dist.barrier()
        over = [outgoing.over(index) for index in range(4)]
        for index in reversed(range(4)):
            outgoing.complete(index)
        return {"sent": outgoing.num_messages, "held": len(outgoing._in_flight), "over": [each() for each in over]}
    incoming = Incoming(0, group, shapes, torch.device("cpu"))
    for index in range(4):
        incoming.post(index, index % 2)
    dist.barrier()
    # Asked for in another order than sent: the channel reads on to the one wanted and keeps those before it.
    found = {}
    for index in (2, 0, 1, 3):
        over = incoming.over(index)
        assert known <= (over is not None), "what is posted can tell"
        first, second = incoming.wait(index)
        assert over is None or over()
        same = torch.equal(first, _tensors(index)[0]) and torch.equal(second, _tensors(index)[1])
        found[index] = (same, first.is_leaf, first.requires_grad, second.requires_grad, second.dtype == torch.int64)
    return {"found": found, "held": len(incoming._posted) + len(incoming._unposted)}


@pytest.mark.parametrize(("known", "messages"), [(True, 8), (False, 10)], ids=["shapes known", "headers"])
def test_messages_arrive_in_order_with_and_without_headers(known: bool, messages: int) -> None:
    sender, receiver = run_distributed(_exchange, 2, known)
    assert sender == {"sent": messages, "held": 0, "over": [True] * 4}
    assert receiver == {"found": dict.fromkeys((2, 0, 1, 3), (True, True, True, False, True)), "held": 0}


def _send_a_view() -> list[list[float]] | None:
    group = dist.group.WORLD
    whole = torch.arange(12.0).reshape(3, 4)
    if dist.get_rank() == 0:
        outgoing = Outgoing(1, group, ShapeBook())
        outgoing.send("a", "a", (whole[:, 1:3],))
        outgoing.complete("a")
        return None
    incoming = Incoming(0, group, ShapeBook(), torch.device("cpu"))
    incoming.post("a", "a")
    return incoming.wait("a")[0].tolist()


def test_a_view_is_sent_as_what_it_shows() -> None:
    assert run_distributed(_send_a_view, 2)[1] == [[1.0, 2.0], [5.0, 6.0], [9.0, 10.0]]
