"""Messages between two ranks: order, headers, shapes, and tensors with and without gradients."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.runtime.channels import _DTYPES, Incoming, Outgoing, ShapeBook, TensorSpec, _header, _read_header
from tests.distributed import run_distributed

HIDDEN = TensorSpec((2, 3), torch.float32, True)
MASK = TensorSpec((2,), torch.bool, False)


def test_shapes_are_found_by_a_rule_or_noted() -> None:
    calls = []
    book = ShapeBook(lambda kind: calls.append(kind) or (HIDDEN,))
    assert book.find("a") == book.find("a") == (HIDDEN,)
    book.clear()
    book.find("a")
    assert calls == ["a", "a"]
    book = ShapeBook()
    assert book.find("a") is None
    for _ in range(2):
        book.note("a", (HIDDEN, MASK))
    assert (book.find("a"), book.find("b")) == ((HIDDEN, MASK), None)


@pytest.mark.parametrize(
    "changed",
    [(HIDDEN._replace(shape=(2, 4)),), (HIDDEN._replace(dtype=torch.float64),), (HIDDEN, MASK)],
    ids=["shape", "dtype", "count"],
)
def test_a_change_is_refused_with_both_shapes_and_the_remedy(changed: tuple[TensorSpec, ...]) -> None:
    book = ShapeBook()
    book.note("a", (HIDDEN,))
    with pytest.raises(UserError, match=r"^activations changed from \[2, 3\] float32 to .* dynamic_shape=True, .*$"):
        book.note("a", changed)


@pytest.mark.parametrize(
    "spec",
    [
        (),
        (HIDDEN,),
        (HIDDEN, MASK, TensorSpec((), torch.int64, False)),
        tuple(TensorSpec((1,), dtype, False) for dtype in _DTYPES),
        tuple(TensorSpec((7, index), torch.bfloat16, index % 2 == 0) for index in range(20)),
    ],
)
def test_a_header_reads_back(spec: tuple[TensorSpec, ...]) -> None:
    assert _read_header(_header(spec)) == spec


def test_too_many_tensors_for_a_header_are_refused() -> None:
    with pytest.raises(UserError, match="pass fewer tensors, or give the module an activation_spec"):
        _header((HIDDEN,) * 60)


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16, torch.uint32], ids=str)
@pytest.mark.parametrize("known", [False, True], ids=["header", "rule"])
def test_types_that_nccl_cannot_send_are_refused_on_every_device(known: bool, dtype: torch.dtype) -> None:
    """A model that runs on CPUs runs on GPUs, too. Nothing is posted before."""
    tensors = torch.zeros(2, 3), torch.zeros(4, dtype=dtype)
    book = ShapeBook((lambda _: tuple(map(TensorSpec.of, tensors))) if known else None)
    outgoing = Outgoing(1, dist.group.WORLD, book)
    line = rf"^stages exchange \[4\] {str(dtype)[6:]}, a type that NCCL cannot send: pass another type, such as int32"
    with pytest.raises(UserError, match=line):
        outgoing.send("a", "a", tensors)
    assert not outgoing.num_messages
    if known:
        with pytest.raises(UserError, match=line):
            Incoming(0, dist.group.WORLD, book, torch.device("cpu")).post("a", "a")


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
        for index in reversed(range(4)):
            outgoing.complete(index)
        return {"sent": outgoing.num_messages, "held": len(outgoing._in_flight)}
    incoming = Incoming(0, group, shapes, torch.device("cpu"))
    for index in range(4):
        incoming.post(index, index % 2)
    dist.barrier()
    # In another order than sent: the channel reads up to the requested message and keeps those before it.
    found = {}
    for index in (2, 0, 1, 3):
        assert known <= (index in incoming._posted), "it is posted"
        first, second = incoming.wait(index)
        same = torch.equal(first, _tensors(index)[0]) and torch.equal(second, _tensors(index)[1])
        found[index] = (same, first.is_leaf, first.requires_grad, second.requires_grad, second.dtype == torch.int64)
    return {"found": found, "held": len(incoming._posted) + len(incoming._unposted)}


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


def _exchanges() -> tuple[Any, ...]:
    return _exchange(True), _exchange(False), _send_a_view()


def test_messages_arrive_in_order_with_and_without_headers() -> None:
    (*sent, _), (*received, view) = run_distributed(_exchanges, 2)
    assert sent == [{"sent": number, "held": 0} for number in (8, 10)]
    assert received == [{"found": dict.fromkeys((2, 0, 1, 3), (True, True, True, False, True)), "held": 0}] * 2
    assert view == [[1.0, 2.0], [5.0, 6.0], [9.0, 10.0]]
