"""The balance of experts in token slices, in one process: losses against plain autograd over the whole batch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil
from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.utils import maybe_loss_for_backward
from torch import Tensor, nn

from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.attention.documents import Documents
from deepspeed_ext.runtime.executor import Executor
from deepspeed_ext.runtime.state.counts import Tallies
from deepspeed_ext.runtime.state.sequence_state import Past, SequenceState
from deepspeed_ext.runtime.topology import SequenceParallelRanks
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.model.balance import Balance
from megatron_terapipe.model.tensor_parallel import TensorParallelRanks

ROWS, SEQ, WIDTH, EXPERTS, CHOSEN, MICRO_BATCHES, FACTOR = 2, 12, 5, 4, 2, 3, 0.7
CUTS = [(12,), (6, 6), (3, 3, 3, 3), (1, 7, 4)]
STARTS = [((0, 2, 7), (0, 8)), ((0,), (0, 1, 2)), ((0, 6), (0, 11))]


def model_of(**settings: object) -> ModelConfig:
    return ModelConfig(
        num_layers=1,
        hidden_size=WIDTH * 4,
        num_attention_heads=1,
        seq_length=SEQ,
        num_experts=EXPERTS,
        moe_router_topk=CHOSEN,
        **settings,
    )


class Router(nn.Module):
    """A router with the balance of a model, and an output that depends on its logits."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, dtype=torch.float64))
        self.expert_bias = torch.zeros(EXPERTS)
        bias = (lambda: self.expert_bias) if model.moe_router_enable_expert_bias else None
        self.balance = Balance(model, TensorParallelRanks(), bias)

    def forward(self, hidden: Tensor, past: Past) -> Tensor:
        rows = len(hidden)
        logits = (self.balance.jittered(hidden, past) @ self.weight.t()).flatten(0, 1)

        def choose() -> Tensor:
            chosen = logits.detach().topk(CHOSEN).indices
            self.balance.count(chosen, rows, past)
            return chosen

        chosen = past.cached_for_recompute("chosen", choose)
        return self.balance.with_losses(logits, rows, past).gather(1, chosen).sin().sum()


def batch() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, SEQ, WIDTH, dtype=torch.float64, generator=generator) for _ in range(MICRO_BATCHES)]


@dataclass(frozen=True)
class Order:
    """Forwards of this many micro-batches precede the first backward; forwards may be computed again."""

    ahead: int = MICRO_BATCHES
    again: bool = False


def trained(model: ModelConfig, cut: tuple[int, ...], order: Order) -> tuple[Router, Tallies]:
    """A step of a stage with this router, after all backwards."""
    router, slices = Router(model), TokenSlices(cut)
    tallies = Tallies([(3, router)], torch.device("cpu"), micro_batch_groups=(), stage_groups=())
    tallies.begin(whole_step=order.ahead == MICRO_BATCHES)
    live: list[list[Callable[[], Tensor]]] = []

    def backward() -> None:
        for output in reversed(live.pop(0)):
            (output() * FACTOR).backward()

    for number, inputs in enumerate(batch()):
        documents = Documents(STARTS[number], numbered=True).on(torch.device("cpu"), slices)
        sequences = range(number * ROWS, number * ROWS + ROWS)
        state = SequenceState(slices, sequences=sequences, documents=documents, loss_factor=lambda: FACTOR)
        outputs: list[Callable[[], Tensor]] = []
        for index, part in enumerate(inputs.split(cut, dim=1)):
            forward = partial(router, part, state.past(0, index))
            with torch.set_grad_enabled(not order.again):
                output = forward()
            outputs.append(forward if order.again else partial(torch.Tensor.view_as, output, output))
        tallies.close(state.counts.values(), 0, MICRO_BATCHES)
        live.append(outputs)
        if len(live) == order.ahead:
            backward()
    while live:
        backward()
    tallies.finish_step(True, MICRO_BATCHES)
    return router, tallies


def groups_of(kind: str, micro_batch: int) -> Tensor:
    """Number of each token's group [T]."""
    if kind == "seq_aux_loss":
        return torch.arange(ROWS).repeat_interleave(SEQ)
    if kind == "document_aux_loss":
        rows = [torch.tensor([sum(at >= start for start in row) for at in range(SEQ)]) for row in STARTS[micro_batch]]
        return torch.cat([row + SEQ * number for number, row in enumerate(rows)])
    return torch.zeros(ROWS * SEQ, dtype=torch.int64)


def reference(model: ModelConfig, order: Order) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Gradient, counts and logged losses by plain autograd, with the loss written as in the paper."""
    router, kind = Router(model), model.moe_router_load_balancing_type
    sigmoid = model.moe_router_score_function == "sigmoid"
    masks, scores, logits_of = [], [], []
    loss = torch.zeros((), dtype=torch.float64)
    for inputs in batch():
        logits = (inputs @ router.weight.t()).flatten(0, 1)
        chosen = logits.topk(CHOSEN).indices
        loss = loss + logits.gather(1, chosen).sin().sum()
        masks.append(torch.zeros_like(logits).scatter(1, chosen, 1.0))
        score = logits.sigmoid() if sigmoid else logits.softmax(1)
        scores.append(score / score.sum(1, keepdim=True))
        logits_of.append(logits)
    logged = dict.fromkeys(model.router_losses, 0.0)
    for number, (mask, score, logits) in enumerate(zip(masks, scores, logits_of, strict=True)):
        tokens, groups = len(mask), groups_of(kind, number)
        of_group = []
        for group in groups.unique():
            members = groups == group
            chosen, size = mask[members].sum(0), int(members.sum())
            if kind == "global_aux_loss":
                seen = masks if order.ahead == MICRO_BATCHES else masks[: number + 1]
                chosen, size = torch.cat(seen).sum(0) / len(seen), tokens
            balance = EXPERTS / (CHOSEN * size**2) * (chosen * score[members].sum(0)).sum()
            of_group.append(balance * size / tokens)
        auxiliary, z = torch.stack(of_group).sum(), logits.exp().sum(1).log().square().mean()
        loss = loss + model.moe_aux_loss_coeff * auxiliary + (model.moe_z_loss_coeff or 0) * z
        for name, value in zip(logged, (auxiliary, z) if model.moe_aux_loss_coeff else (z,), strict=False):
            logged[name] += value.item() / MICRO_BATCHES
    (loss * FACTOR).backward()
    return router.weight.grad, torch.cat(masks).sum(0).to(torch.int64), logged


AUXILIARY = {"moe_aux_loss_coeff": 0.9}
RULES = [
    {"moe_router_load_balancing_type": kind, **AUXILIARY}
    for kind in ("aux_loss", "seq_aux_loss", "document_aux_loss", "global_aux_loss")
]
RULES += [
    {"moe_router_load_balancing_type": "none", "moe_z_loss_coeff": 0.4},
    {"moe_router_score_function": "sigmoid", "moe_z_loss_coeff": 0.4, **RULES[2]},
    {"moe_router_load_balancing_type": "none"},
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: "-".join(map(str, rule.values())))
@pytest.mark.parametrize("order", [Order(), Order(again=True), Order(1), Order(2, again=True)], ids=str)
def test_losses_in_token_slices_are_those_of_whole_micro_batches(rule: dict[str, object], order: Order) -> None:
    model = model_of(**rule)
    gradient, counts, logged = reference(model, order)
    for cut in CUTS:
        router, tallies = trained(model, cut, order)
        assert (router.weight.grad - gradient).norm() <= 1e-12 * gradient.norm(), cut
        found = tallies.take(5, None)
        assert found.counts[3].tolist() == counts.tolist()
        assert found.counts.sum() == counts.sum(), "other layers count nothing"
        assert found.values[3].tolist() == pytest.approx(list(logged.values()), rel=1e-12)


def test_capacity_drops_by_position_whatever_the_cut() -> None:
    model = model_of(moe_expert_capacity_factor=0.7)
    capacity = ceil(0.7 * SEQ * CHOSEN / EXPERTS)
    draw = torch.Generator().manual_seed(2)
    chosen = torch.rand(ROWS, SEQ, EXPERTS, generator=draw).topk(CHOSEN).indices
    expected = torch.zeros_like(chosen, dtype=torch.bool)
    for row in range(ROWS):
        used = [0] * EXPERTS
        for token in range(SEQ):
            for number, expert in enumerate(chosen[row, token].tolist()):
                expected[row, token, number] = used[expert] < capacity
                used[expert] += 1
    assert 0 < (~expected).sum() < expected.numel() / 2
    balance = Balance(model, TensorParallelRanks())
    for cut in CUTS:
        state, parts = SequenceState(TokenSlices(cut)), chosen.split(cut, dim=1)
        found = [
            balance.within_capacity(part.flatten(0, 1), ROWS, state.past(0, index)).unflatten(0, (ROWS, -1))
            for index, part in enumerate(parts)
        ]
        assert torch.equal(torch.cat(found, dim=1), expected), cut


def test_jitter_depends_on_the_position_only() -> None:
    balance = Balance(model_of(moe_input_jitter_eps=0.1), TensorParallelRanks())
    inputs = torch.ones(ROWS, SEQ, 400, dtype=torch.float64, requires_grad=True)
    found = []
    for cut in CUTS:
        state = SequenceState(TokenSlices(cut), sequences=(5, 6))
        parts = enumerate(inputs.split(cut, dim=1))
        found.append(torch.cat([balance.jittered(part, state.past(0, index)) for index, part in parts], dim=1))
        assert torch.equal(found[0], found[-1])
    factors = found[0].detach()
    assert 0.9 <= factors.min() < 0.901 < 1.099 < factors.max() <= 1.1
    assert abs(factors.mean() - 1) < 3e-3 > abs(factors.std() - 0.1 / 3**0.5)
    assert torch.equal(torch.autograd.grad(found[0].sum(), inputs)[0], factors)
    assert balance.eval().jittered(inputs, None) is inputs


def test_the_bias_moves_once_a_step_towards_experts_with_few_tokens() -> None:
    model = model_of(moe_router_enable_expert_bias=True, moe_router_bias_update_rate=0.25)
    router, tallies = trained(model, CUTS[-1], Order(1))
    counts = tallies.take(5, None).counts[3]
    mean = MICRO_BATCHES * ROWS * SEQ * CHOSEN / EXPERTS
    assert counts.sum() == mean * EXPERTS
    assert router.expert_bias.tolist() == [0.25 * ((mean > count) - (mean < count)) for count in counts.tolist()]
    before = router.expert_bias.clone()
    for updated in (False, torch.tensor(False)):
        tallies.finish_step(updated, MICRO_BATCHES)
        assert torch.equal(router.expert_bias, before)
    tallies.begin(whole_step=False)
    tallies.finish_step(True, MICRO_BATCHES)
    assert torch.equal(router.expert_bias, before), "equal counts have no sign"


def test_evaluation_counts_nothing() -> None:
    router = Router(model_of(**RULES[0])).eval()
    state = SequenceState(TokenSlices((SEQ,)), forward_only=True)
    router(batch()[0], state.past(0, 0)).backward()
    assert not state.counts


def test_losses_are_scaled_in_backwards_of_fp16() -> None:
    """DeepSpeed scales tensors with a graph only, and a backward records none."""

    def scaled(loss: Tensor) -> Tensor:
        mean = loss / 4
        return mean * 256 if maybe_loss_for_backward(mean) else mean

    executor = SimpleNamespace(
        _loss_scale=scaled, _module=SimpleNamespace(sequence_ranks=SequenceParallelRanks(size=2))
    )
    with torch.no_grad():
        assert Executor._layer_loss_factor(executor) == 256 / 4 * 2
