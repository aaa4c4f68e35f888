"""A layer of experts against its formula, token by token; repeated forwards; products of experts."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.state.sequence_state import SequenceState
from megatron_terapipe.model.expert_dispatch import Pairs
from megatron_terapipe.model.experts import ExpertLayer, choose, weigh
from tests.model.configs import expert_config
from tests.model.rank_checks import ALONE, drawn

GATED = {"activation": "swiglu", "disable_bias_linear": True}
LAYERS = {
    "biases": {},
    "gated": GATED,
    "one_choice": {**GATED, "moe_router_topk": 1, "moe_router_pre_softmax": True},
    "shared": {**GATED, "moe_shared_expert_intermediate_size": 20},
    "gated_shared": {**GATED, "moe_shared_expert_intermediate_size": 20, "moe_shared_expert_gate": True},
    "groups": {
        **GATED,
        **{"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_topk": 4},
        **{"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk_scaling_factor": 2.5},
    },
}


def layer_of(name: str) -> ExpertLayer:
    model = expert_config(**LAYERS[name])
    layer = ExpertLayer(model, model.blocks[0], ALONE).double()
    for seed, weight in enumerate(layer.parameters()):
        weight.data = drawn(*weight.shape, seed=seed) * weight.shape[-1] ** -0.5
    if layer.router.expert_bias is not None:
        layer.router.expert_bias.copy_(drawn(8, seed=99) * 0.1)
    return layer


def written_out(layer: ExpertLayer, hidden: Tensor) -> Tensor:
    """Each token with each of its experts, one after the other."""
    rule, experts = layer.router.rule, layer.experts
    activation = experts.weighted_activation._activation
    tokens = hidden.flatten(0, 1)
    logits = tokens @ layer.router.weight.t() + (0 if layer.router.bias is None else layer.router.bias)
    chosen = choose(logits.detach(), rule, layer.router.expert_bias)
    outputs = []
    for token, numbers, weights in zip(tokens, chosen, weigh(logits, chosen, rule), strict=True):
        output = torch.zeros_like(token)
        for number, weight in zip(numbers, weights, strict=True):
            up, down = (None if b is None else b[number].flatten() for b in (experts.up_bias, experts.down_bias))
            widened = activation(F.linear(token, experts.up[number].flatten(0, -2), up))
            output = output + weight * F.linear(widened, experts.down[number], down)
        outputs.append(output)
    found = torch.stack(outputs).view_as(hidden)
    if layer.shared is None:
        return found
    gates = 1 if layer.shared_gate is None else 1 / (1 + torch.exp(-(hidden * layer.shared_gate).sum(2, keepdim=True)))
    return found + gates * layer.shared(hidden)


@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients(name: str) -> None:
    """Over three token slices, so that gradients of weights also add up in place, with repeated forwards between."""
    results = []
    for written in (False, True):
        layer, state = layer_of(name), SequenceState(TokenSlices((5,) * 3))
        found = []
        for step in range(3):
            hidden = drawn(2, 5, 16, seed=step).requires_grad_()
            past = state.past(0, step)
            output = written_out(layer, hidden) if written else layer(hidden, past)
            (output * drawn(2, 5, 16, seed=50 + step)).sum().backward()
            found += [output, hidden.grad]
        results.append([*found, *(weight.grad for weight in layer.parameters())])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_repeated_forward_keeps_the_choice() -> None:
    """Though the router would now choose others; without a backward to come it does."""
    layer, hidden = layer_of("gated"), drawn(1, 5, 16, seed=0)
    for forward_only in (False, True):
        past = SequenceState(TokenSlices((5,)), forward_only=forward_only).past(0, 0)
        first, _ = layer.router(hidden, past)
        layer.router.weight.data.neg_()
        second, _ = layer.router(hidden, past)
        assert torch.equal(first, second) is not forward_only


def test_an_expert_without_tokens_and_pairs_of_other_ranks() -> None:
    layer = layer_of("gated")
    chosen = torch.tensor([[1, 8], [8, 8], [7, 1]])  # 8 is no expert of this rank
    pairs = Pairs.of(chosen, 8)
    assert pairs.counts_E.tolist() == [0, 2, 0, 0, 0, 0, 0, 1]
    output = layer.experts(drawn(6, 16, seed=1), torch.ones(6, dtype=torch.float64), pairs)
    assert not output[3:].any() and output[:3].any(1).all()
