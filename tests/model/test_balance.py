"""The balance of experts in token slices, in one process: capacity, jitter and bias.

Losses and counts are compared with plain autograd in `tests/training/equivalence/test_expert_balance.py`.
"""

from math import ceil
from types import SimpleNamespace

import torch
from deepspeed.runtime.utils import maybe_loss_for_backward
from torch import Tensor, nn

from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.executor import Executor
from deepspeed_ext.runtime.state.counts import Tallies
from deepspeed_ext.runtime.state.sequence_state import Past, SequenceState
from deepspeed_ext.runtime.topology import SequenceParallelRanks
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.model.balance import Balance
from megatron_terapipe.model.tensor_parallel import TensorParallelRanks

ROWS, SEQ, WIDTH, EXPERTS, CHOSEN, MICRO_BATCHES = 2, 12, 5, 4, 2, 3
CUTS = [(12,), (6, 6), (3, 3, 3, 3), (1, 7, 4)]


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


def trained(model: ModelConfig, cut: tuple[int, ...]) -> tuple[Router, Tallies]:
    """A step of a stage with this router: each micro-batch forward and at once backward."""
    router, slices = Router(model), TokenSlices(cut)
    tallies = Tallies([(3, router)], torch.device("cpu"), micro_batch_groups=(), stage_groups=())
    tallies.begin(whole_step=False)
    for inputs in batch():
        state = SequenceState(slices)
        outputs = [router(part, state.past(0, index)) for index, part in enumerate(inputs.split(cut, dim=1))]
        tallies.close(state.counts.values(), 0, MICRO_BATCHES)
        for output in reversed(outputs):
            output.backward()
    tallies.finish_step(True, MICRO_BATCHES)
    return router, tallies


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
    router, tallies = trained(model, CUTS[-1])
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
    router = Router(model_of(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.9)).eval()
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
