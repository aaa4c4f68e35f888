"""Checks of the layers on every rank of a tensor-parallel group; all collectives come before the first assertion."""

from dataclasses import dataclass
from itertools import product
from math import inf
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.state.sequence_state import SequenceState
from megatron_terapipe.model.block import TransformerBlock
from megatron_terapipe.model.embedding import OutputLayer, WordEmbedding, tied_logits
from megatron_terapipe.model.experts import ExpertLayer
from megatron_terapipe.model.logits import LiveLogits, Logits
from megatron_terapipe.model.tensor_parallel import TensorParallelRanks
from tests.model.configs import expert_config, model_config

ALONE = TensorParallelRanks()


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The same numbers on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def part_of(whole: Tensor, parameter: nn.Parameter, ranks: TensorParallelRanks) -> Tensor:
    """The part of a tensor of the whole weight's shape that belongs to a rank's parameter."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    step = whole.shape[parameter.partition_dim] // ranks.size
    return whole.narrow(parameter.partition_dim, ranks.rank * step, step)


def tokens_of(whole: Tensor, ranks: TensorParallelRanks) -> Tensor:
    """The tokens of [B, N, ...] that a rank has between the matrices."""
    if not ranks.sequence_parallel:
        return whole
    step = whole.shape[1] // ranks.size
    return whole.narrow(1, ranks.rank * step, step)


def fill(whole: nn.Module, part: nn.Module, ranks: TensorParallelRanks) -> None:
    """Give both the same numbers of order 1, which no initializer would."""
    for seed, (one, other) in enumerate(zip(whole.parameters(), part.parameters(), strict=True)):
        scale = one.shape[-1] ** -0.5 if one.dim() > 1 else 0.5
        one.data = drawn(*one.shape, seed=100 + seed) * scale
        other.data = part_of(one.data, other, ranks).clone()


def complete_gradients(module: nn.Module, ranks: TensorParallelRanks) -> dict[str, Tensor]:
    """Gradients by name; those of weights that each rank applied to its own tokens summed, as training does."""
    gradients = {}
    for name, parameter in module.named_parameters():
        gradients[name] = parameter.grad.clone()
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(gradients[name])
    return gradients


def assert_gradients(found: dict[str, Tensor], part: nn.Module, whole: nn.Module, ranks: TensorParallelRanks) -> None:
    for (name, parameter), one in zip(part.named_parameters(), whole.parameters(), strict=True):
        expected = part_of(one.grad, parameter, ranks)
        torch.testing.assert_close(
            found[name],
            expected,
            rtol=1e-12,
            atol=1e-12 * one.grad.abs().max().item(),
            msg=lambda text, name=name: f"{name}: {text}",
        )


DTYPES = torch.float64, torch.float32, torch.bfloat16
MODEL = model_config(hidden_size=16, vocab_size=250, make_vocab_size_divisible_by=8)


def collectives(ranks: TensorParallelRanks) -> None:
    for rows in (1, 3):
        each = [drawn(rows, 8, 5, seed=rank) for rank in range(ranks.size)]
        own = each[ranks.rank]
        pending = ranks.start_gather(own), ranks.start_reduce_scatter(own), ranks.start_sum(own.clone())
        gathered, scattered, summed = (finish() for finish in pending)
        # A view, as of a gradient.
        transposed = drawn(8, rows, 5, seed=ranks.rank).transpose(0, 1)
        gathered_view = ranks.start_gather(transposed)()
        scattered_view = ranks.start_reduce_scatter(transposed)()
        total = torch.stack(each).sum(0)
        step = 8 // ranks.size
        here = slice(ranks.rank * step, (ranks.rank + 1) * step)
        assert torch.equal(gathered, torch.cat(each, 1))
        torch.testing.assert_close(scattered, total[:, here], rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(summed, total, rtol=1e-14, atol=1e-14)
        views = [drawn(8, rows, 5, seed=rank).transpose(0, 1) for rank in range(ranks.size)]
        assert torch.equal(gathered_view, torch.cat(views, 1))
        torch.testing.assert_close(scattered_view, torch.stack(views).sum(0)[:, here], rtol=1e-14, atol=1e-14)


def attention_and_mlp_side_by_side_are_one_sum(ranks: TensorParallelRanks) -> None:
    """And two with dropout in training, where each has its mask, or one after the other."""
    for parallel, dropout, training, expected in (
        (True, 0.0, True, 1),
        (True, 0.1, False, 1),
        (True, 0.1, True, 2),
        (False, 0.0, True, 2),
    ):
        model = model_config(hidden_dropout=dropout, parallel_residual=parallel)
        block = TransformerBlock(model, model.blocks[0], ranks).train(training)
        state = SequenceState(TokenSlices((8,)), seed=1, sequences=(0, 1))
        with patch.object(TensorParallelRanks, "sum_parts", autospec=True, side_effect=_SUM_PARTS) as sums:
            block(tokens_of(drawn(2, 8, model.hidden_size, seed=3), ranks).float(), state.past(0, 0))
        assert sums.call_count == expected, (parallel, dropout, training)


_SUM_PARTS = TensorParallelRanks.sum_parts


def logits(ranks: TensorParallelRanks) -> None:
    """Tied and untied, from the tokens that a rank has to its part of the vocabulary for all tokens."""
    coefficients = drawn(2, 8, 256, seed=1)
    mine = slice(ranks.rank * 256 // ranks.size, (ranks.rank + 1) * 256 // ranks.size)
    for kind, apply in [(WordEmbedding, tied_logits), (OutputLayer, lambda layer, hidden: layer(hidden))]:
        whole, part = kind(MODEL, ALONE).double(), kind(MODEL, ranks).double()
        fill(whole, part, ranks)
        hidden = drawn(2, 8, 16, seed=2)
        own = tokens_of(hidden, ranks).clone().requires_grad_()
        hidden.requires_grad_()
        found = apply(part, own).compute()
        (found * coefficients[..., mine]).sum().backward()
        (weight,) = whole.parameters()
        # 250 words, and padding.
        expected = F.pad(hidden @ weight[:250].T, (0, 6), value=-inf)
        (expected * coefficients).sum().backward()
        gradients = complete_gradients(part, ranks)
        torch.testing.assert_close(found, expected[..., mine], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(own.grad, tokens_of(hidden.grad, ranks), rtol=1e-12, atol=1e-12)
        assert_gradients(gradients, part, whole, ranks)


def losses(ranks: TensorParallelRanks) -> None:
    """Loss and gradients, whatever the logits, however few of them may be alive."""
    width = 24 // ranks.size
    targets = torch.tensor([[0, width - 1, width, 23], [3, 11, 12, 23]])
    far = torch.zeros(24, dtype=torch.float64)
    far[:width] = -1e5  # the logits of the first rank are negligible
    cases = {
        "small": drawn(2, 4, 24, seed=1),
        "large": drawn(2, 4, 24, seed=2) * 1e4,
        "one part far below": drawn(2, 4, 24, seed=3) + far,
        "all equal": torch.full((2, 4, 24), 700.0, dtype=torch.float64),
    }
    _assert_losses(_losses_and_gradients(ranks, cases, targets))


def losses_of_padded_and_capped_logits(ranks: TensorParallelRanks) -> None:
    """Padding has no effect and no gradient, also on ranks with padding only."""
    targets = torch.tensor([[0, 5, 6, 9], [3, 9, 1, 8]])
    small = drawn(2, 4, 24, seed=1)
    cases = {"small": small, "large padding": torch.cat((small[..., :10], small[..., 10:] + 1e4), -1)}
    results = [
        *_losses_and_gradients(ranks, cases, targets, words=10),
        *_losses_and_gradients(ranks, cases, targets, words=23),
        *_losses_and_gradients(ranks, {"small": small}, targets, words=10, softcap=6.0),
        # In bf16 the slope of a logit near the cap has few digits.
        *_losses_and_gradients(ranks, {"beyond": 20 * small}, targets, words=10, softcap=3.0, dtypes=DTYPES[:2]),
        *_losses_and_gradients(ranks, {"small": small}, targets, softcap=0.5, dtypes=DTYPES[:2]),
    ]
    _assert_losses(results)
    for result in results:
        of_weight, _, _ = result.gradients[1]
        assert not of_weight[max(result.words - ranks.rank * 24 // ranks.size, 0) :].any(), result.name


@dataclass(frozen=True)
class _Result:
    name: str
    dtype: torch.dtype
    words: int
    softcap: float | None
    losses: tuple[torch.Tensor, torch.Tensor]
    """Found and expected."""
    gradients: tuple[tuple[torch.Tensor, torch.Tensor, float], ...]
    """Found and expected, and 1 where it is a sum of many."""


def _losses_and_gradients(
    ranks: TensorParallelRanks,
    cases: dict[str, torch.Tensor],
    targets: torch.Tensor,
    *,
    words: int = 24,
    softcap: float | None = None,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
) -> list[_Result]:
    """Loss and gradients of the first `words` of 24 logits, and torch's."""
    width = 24 // ranks.size
    mine = slice(ranks.rank * width, (ranks.rank + 1) * width)
    results = []
    for (name, whole), limit in product(cases.items(), (8 * width, 3 * width)):
        for dtype in dtypes:
            at_least_fp32 = torch.promote_types(dtype, torch.float32)
            whole_logits = whole.to(dtype, copy=True).to(at_least_fp32).requires_grad_()
            # A weight that gives each column of its input as a logit.
            own = tokens_of(whole, ranks).to(dtype).clone().requires_grad_()
            weight = torch.eye(24, dtype=dtype)[mine].clone().requires_grad_()
            logits = Logits(own, weight, ranks, LiveLogits(limit), words=words, softcap=softcap)
            found = logits.cross_entropy(targets)
            capped = whole_logits if softcap is None else softcap * torch.tanh(whole_logits / softcap)
            counted = capped[..., :words].flatten(0, 1)
            expected = F.cross_entropy(counted, targets.flatten(), reduction="none").view(2, 4)
            coefficients = drawn(2, 4, seed=4).to(at_least_fp32)
            (found * coefficients).sum().backward()
            (expected * coefficients).sum().backward()
            of_weight = whole_logits.grad.flatten(0, 1).T[mine] @ whole_logits.detach().flatten(0, 1)
            gradients = (own.grad, tokens_of(whole_logits.grad, ranks), 0.0), (weight.grad, of_weight, 1.0)
            results.append(_Result(name, dtype, words, softcap, (found, expected), gradients))
    return results


def _assert_losses(results: list[_Result]) -> None:
    for result in results:
        found, expected = result.losses
        assert found.dtype is expected.dtype, result
        tolerance = 1e-12 if result.dtype is torch.float64 else 1e-6
        rounding = 2**-8 if result.dtype is torch.bfloat16 else tolerance
        # A cap is applied to logits in their own type.
        of_loss = tolerance if result.softcap is None else rounding * max(result.softcap, 1)
        torch.testing.assert_close(found, expected, rtol=of_loss, atol=of_loss)
        for gradient, wanted, is_sum in result.gradients:
            assert gradient.dtype is result.dtype
            # Of a sum that cancels out, the error is that of its largest terms.
            atol = of_loss + is_sum * rounding * wanted.abs().max().item()
            torch.testing.assert_close(gradient.to(wanted.dtype), wanted, rtol=rounding, atol=atol)


def experts_on_ranks(ranks: TensorParallelRanks) -> None:
    """Each rank has its tokens and its experts, by both dispatchers; the second forward is a repeated one.

    With biases there is a capacity.
    """
    if not ranks.sequence_parallel:
        return
    shared = {"moe_shared_expert_intermediate_size": 8, "activation": "swiglu", "disable_bias_linear": True}
    for kind, settings in product(("alltoall", "allgather"), ({"moe_expert_capacity_factor": 0.8}, shared)):
        model = expert_config(moe_token_dispatcher_type=kind, **settings)
        whole, part = (ExpertLayer(model, model.blocks[0], each, each).double() for each in (ALONE, ranks))
        fill(whole, part, ranks)
        states = [SequenceState(TokenSlices((8,) * 3)) for _ in range(2)]
        seen = []
        for step in range(3):
            hidden, coefficients = drawn(2, 8, 16, seed=step), drawn(2, 8, 16, seed=30 + step)
            own = tokens_of(hidden, ranks).clone().requires_grad_()
            with torch.no_grad():
                first = part(own, states[0].past(0, step))
            found = part(own, states[0].past(0, step))
            (found * tokens_of(coefficients, ranks)).sum().backward()
            hidden.requires_grad_()
            expected = whole(hidden, states[1].past(0, step))
            (expected * coefficients).sum().backward()
            seen += [(found, tokens_of(expected, ranks)), (own.grad, tokens_of(hidden.grad, ranks)), (first, found)]
        gradients = complete_gradients(part, ranks)
        for found, expected in seen:
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert_gradients(gradients, part, whole, ranks)


CHECKS = {
    check.__name__: check
    for check in (
        collectives,
        attention_and_mlp_side_by_side_are_one_sum,
        logits,
        losses,
        losses_of_padded_and_capped_logits,
        experts_on_ranks,
    )
}
