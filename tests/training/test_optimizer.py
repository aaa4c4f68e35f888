"""Which parameters decay, and by which rule they are updated."""

import pytest
import torch
from torch import nn

from megatron_terapipe.config import OptimizerConfig
from megatron_terapipe.inference.whole_model import WholeModel
from megatron_terapipe.training.optimizer import build_optimizer, set_learning_rate
from tests.model.configs import model_config


def test_matrices_decay_and_vectors_do_not() -> None:
    model = WholeModel(model_config())
    groups = build_optimizer(OptimizerConfig(lr=1e-3, weight_decay=0.2), model.parameters()).param_groups
    decay = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    assert {group["weight_decay"] for group in groups} == {0.0, 0.2}
    for name, parameter in model.named_parameters():
        is_vector = name.endswith(".bias") or "norm" in name or name.startswith("layers.5.")
        assert decay.pop(id(parameter)) == (0.0 if is_vector else 0.2), name
    assert not decay


def test_frozen_parameters_and_empty_groups_are_left_out() -> None:
    layer = nn.Linear(3, 2)
    layer.bias.requires_grad_(False)
    (group,) = build_optimizer(OptimizerConfig(lr=1e-3), layer.parameters()).param_groups
    assert [id(parameter) for parameter in group["params"]] == [id(layer.weight)]


def test_flags_reach_adam() -> None:
    config = OptimizerConfig(lr=0.5, adam_beta1=0.8, adam_beta2=0.7, adam_eps=0.1, weight_decay=0.2)
    weight = nn.Parameter(torch.tensor([[2.0, -3.0]], dtype=torch.float64))
    optimizer = build_optimizer(config, [weight])
    assert isinstance(optimizer, torch.optim.AdamW)
    expected, mean, square = weight.detach().clone(), torch.zeros(1, 2), torch.zeros(1, 2)
    for step in (1, 2, 3):
        weight.grad = torch.tensor([[1.0, step]], dtype=torch.float64)
        optimizer.step()
        mean = 0.8 * mean + 0.2 * weight.grad
        square = 0.7 * square + 0.3 * weight.grad**2
        scaled = (square / (1 - 0.7**step)).sqrt() + 0.1
        expected = expected * (1 - 0.5 * 0.2) - 0.5 * mean / (1 - 0.8**step) / scaled
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-6, atol=1e-8)


def test_flags_reach_sgd() -> None:
    optimizer = build_optimizer(
        OptimizerConfig(optimizer="sgd", lr=0.5, sgd_momentum=0.6), [nn.Parameter(torch.ones(1))]
    )
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.param_groups[0]["momentum"] == pytest.approx(0.6)


def test_a_learning_rate_holds_for_every_group() -> None:
    optimizer = build_optimizer(OptimizerConfig(lr=0.5), nn.Linear(3, 2).parameters())
    set_learning_rate(optimizer, 0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]
