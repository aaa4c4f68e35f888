"""Logits of one rank: their loss and its gradients, how many are alive, and how many are computed again."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.measuring.counters import LiveBytes
from megatron_terapipe.model import logits
from megatron_terapipe.model.logits import LiveLogits, Logits
from tests.model.rank_checks import ALONE, drawn

VOCABULARY, WIDTH, ROWS = 2048, 2, 2
LENGTHS = (10, 6, 8)
ALL = ROWS * sum(LENGTHS) * VOCABULARY


class Head:
    """A weight, and token slices of a sequence that go through it."""

    def __init__(
        self,
        limit: int,
        dtype: torch.dtype = torch.float64,
        *,
        words: int | None = None,
        softcap: float | None = None,
    ) -> None:
        self.live, self.words, self.softcap = LiveLogits(limit), words, softcap
        self.weight = drawn(VOCABULARY, WIDTH, seed=1, dtype=dtype).requires_grad_()
        self.hidden = [drawn(ROWS, length, WIDTH, seed=2 + length, dtype=dtype).requires_grad_() for length in LENGTHS]
        generator = torch.Generator().manual_seed(0)
        self.targets = [torch.randint(0, VOCABULARY, (ROWS, length), generator=generator) for length in LENGTHS]

    def forward(self, index: int) -> Tensor:
        """Loss of a token slice, its tokens weighted."""
        output = Logits(self.hidden[index], self.weight, ALONE, self.live, words=self.words, softcap=self.softcap)
        losses = output.cross_entropy(self.targets[index])
        return (losses * drawn(*losses.shape, seed=index, dtype=losses.dtype)).sum()

    def step(self, *, last_first: bool = True) -> list[Tensor]:
        """All forwards, then all backwards; losses and gradients."""
        losses = [self.forward(index) for index in range(len(LENGTHS))]
        for index in range(len(LENGTHS))[:: -1 if last_first else 1]:
            losses[index].backward()
        return [*(loss.detach() for loss in losses), self.weight.grad, *(hidden.grad for hidden in self.hidden)]


class _Products(TorchDispatchMode):
    """Counts the logits that products give."""

    logits = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        if function is torch.ops.aten.mm.default and result.shape[-1] == VOCABULARY:
            self.logits += result.numel()
        return result


@contextmanager
def logits_computed() -> Iterator[_Products]:
    with _Products() as products:
        yield products


@pytest.mark.parametrize("last_first", [True, False])
@pytest.mark.parametrize("limit", [ALL, ALL // 2, 7 * VOCABULARY, VOCABULARY, 1])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("words", [VOCABULARY, 2000])
def test_loss_and_gradients_are_torchs_however_few_logits_may_be_alive(
    words: int, softcap: float | None, limit: int, last_first: bool
) -> None:
    """Padding has no effect, and its weights get no gradient."""
    head = Head(limit, words=words, softcap=softcap)
    head.targets = [targets % words for targets in head.targets]
    with torch.no_grad():
        head.weight[2000:] *= 100  # likelier than any word, if padding counted
    found = head.step(last_first=last_first)
    assert not head.weight.grad[words:].any()
    weight = head.weight.detach()[:words].requires_grad_()
    hidden = [each.detach().requires_grad_() for each in head.hidden]
    expected = []
    for index, targets in enumerate(head.targets):
        products = (hidden[index] @ weight.T).flatten(0, 1)
        products = products if softcap is None else softcap * torch.tanh(products / softcap)
        losses = F.cross_entropy(products, targets.flatten(), reduction="none")
        expected.append((losses * drawn(ROWS, LENGTHS[index], seed=index).flatten()).sum())
    sum(expected).backward()
    whole_gradient = F.pad(weight.grad, (0, 0, 0, VOCABULARY - words))
    for got, wanted in zip(found, [*expected, whole_gradient, *(each.grad for each in hidden)], strict=True):
        torch.testing.assert_close(got, wanted.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [2, 6, 24])
def test_no_more_than_the_limit_is_ever_alive(share: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients take the place of logits. Copies in fp32 are those of a few tokens."""
    monkeypatch.setattr(logits, "IN_CACHE", 2 * VOCABULARY)
    limit = ALL // share
    head = Head(limit, dtype)
    with LiveBytes() as live:
        head.step()
    others = 4 * head.weight.numel() * 4
    # Logits in fp32, if they have fewer digits, and their exponentials.
    in_work = 4 if dtype is torch.float32 else 8
    assert live.peak <= limit * dtype.itemsize + logits.IN_CACHE * in_work + others


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_in_work_at_once_change_no_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for at_once in (1, 5 * VOCABULARY, ALL):
        monkeypatch.setattr(logits, "IN_CACHE", at_once)
        found.append(Head(ALL, dtype, words=2000, softcap=0.7).step())
    for other in found[1:]:
        assert all(torch.equal(one, its) for one, its in zip(found[0], other, strict=True))


def test_only_logits_that_do_not_fit_are_recomputed() -> None:
    for limit, again in [(ALL, 0), (ROWS * 8 * VOCABULARY, ROWS * 16), (ROWS * 14 * VOCABULARY, ROWS * 10)]:
        with logits_computed() as found:
            Head(limit).step()
        assert found.logits == ALL + again * VOCABULARY


def test_freed_losses_make_room() -> None:
    head = Head(ALL)
    with LiveBytes() as live:
        loss = head.forward(0)
        kept = live.now
        del loss
        assert kept - live.now >= ROWS * LENGTHS[0] * VOCABULARY * 8
        with torch.no_grad():
            head.forward(0)
        assert live.now < kept / 2
