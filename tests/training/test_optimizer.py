"""Which parameters decay, and by which rule they are updated."""

import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from megatron_terapipe.config import OptimizerConfig
from megatron_terapipe.inference import WholeModel
from megatron_terapipe.training.optimizer import apex_fused_adam, build_optimizer, set_step_sizes
from tests.model.configs import model_config


@pytest.mark.parametrize("of_heads", [False, True])
@pytest.mark.parametrize("shape", [{}, {"activation": "swiglu", "normalization": "rmsnorm"}], ids=["gpt", "gated"])
def test_matrices_decay_and_vectors_only_in_norms_of_heads_if_set(shape: dict[str, str], of_heads: bool) -> None:
    model = WholeModel(model_config(**shape, qk_norm="head"))
    config = OptimizerConfig(lr=1e-3, weight_decay=0.2, apply_wd_to_qk_layernorm=of_heads)
    groups = build_optimizer(config, model.named_parameters()).param_groups
    decay = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    assert {group["weight_decay"] for group in groups} == {0.0, 0.2}
    for name, parameter in model.named_parameters():
        is_vector = name.endswith(".bias") or "norm" in name or name.startswith("layers.5.")
        set_apart = of_heads and any(each in name for each in ("query_norm", "key_norm"))
        assert decay.pop(id(parameter)) == (0.0 if is_vector and not set_apart else 0.2), name
    assert not decay


@pytest.mark.parametrize("untied", [False, True])
def test_a_decoupled_learning_rate_is_that_of_the_words_on_both_ends(untied: bool) -> None:
    model = WholeModel(model_config(untie_embeddings_and_output_weights=untied))
    config = OptimizerConfig(lr=1e-3, decoupled_lr=5e-2, weight_decay=0.2)
    optimizer = build_optimizer(config, model.named_parameters())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for at_first, rates in ((True, (1e-3, 5e-2)), (False, (0.5, 0.25))):
        if not at_first:
            set_step_sizes(optimizer, learning_rate=rates[0], of_ends=rates[1], weight_decay=0.2)
        groups = [({names[id(each)] for each in group["params"]}, group["lr"]) for group in optimizer.param_groups]
        ends = {"layers.0.weight"} | ({next(name for name in names.values() if "linear" in name)} if untied else set())
        assert [lr for names, lr in groups if names & ends] == [rates[1]]
        assert [names for names, lr in groups if lr == rates[1]] == [ends], "positions are not among them"


def test_a_bias_of_two_axes_does_not_decay() -> None:
    parameters = {"up.weight": nn.Parameter(torch.ones(2, 3, 4)), "up.bias": nn.Parameter(torch.ones(2, 3))}
    decaying, others = build_optimizer(OptimizerConfig(lr=1.0), parameters.items()).param_groups
    assert decaying["params"] == [parameters["up.weight"]]
    assert others["params"] == [parameters["up.bias"]]
    assert others["weight_decay"] == 0.0


def test_frozen_parameters_and_empty_groups_are_left_out() -> None:
    layer = nn.Linear(3, 2)
    layer.bias.requires_grad_(False)
    (group,) = build_optimizer(OptimizerConfig(lr=1e-3), layer.named_parameters()).param_groups
    assert [id(parameter) for parameter in group["params"]] == [id(layer.weight)]


def test_flags_reach_the_optimizer() -> None:
    config = OptimizerConfig(lr=0.5, adam_beta1=0.8, adam_beta2=0.7, adam_eps=0.1, weight_decay=0.2)
    optimizer = build_optimizer(config, nn.Linear(3, 2).named_parameters())
    assert type(optimizer) is torch.optim.AdamW  # which decays weights apart from the gradient
    (group, _), names = optimizer.param_groups, ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")
    assert [group[name] for name in names] == [0.5, (0.8, 0.7), 0.1, 0.2, False, False]
    config = OptimizerConfig(optimizer="sgd", lr=0.5, sgd_momentum=0.6)
    optimizer = build_optimizer(config, [("bias", nn.Parameter(torch.ones(1)))])
    assert type(optimizer) is torch.optim.SGD and optimizer.param_groups[0]["momentum"] == 0.6


def test_a_learning_rate_holds_for_every_group_and_a_weight_decay_for_those_that_decay() -> None:
    optimizer = build_optimizer(OptimizerConfig(lr=0.5, weight_decay=0.0), nn.Linear(3, 2).named_parameters())
    set_step_sizes(optimizer, learning_rate=0.125, of_ends=9.0, weight_decay=0.3)
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.125, 0.3), (0.125, 0.0)]


def test_another_apex_is_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyPI's package of that name has no such optimizer, whatever the device."""
    assert apex_fused_adam() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "apex", ModuleType("apex"))
    assert apex_fused_adam() is None
    monkeypatch.setitem(sys.modules, "amp_C", ModuleType("amp_C"))
    assert apex_fused_adam() is None


def test_nvidias_apex_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    class FusedAdam(torch.optim.AdamW):
        def __init__(self, groups, adam_w_mode: bool, **keywords) -> None:
            assert adam_w_mode
            super().__init__(groups, **keywords)

    optimizers = ModuleType("apex.optimizers")
    optimizers.FusedAdam = FusedAdam
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, module in {"amp_C": ModuleType("amp_C"), "apex": ModuleType("apex")}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "apex.optimizers", optimizers)
    optimizer = build_optimizer(OptimizerConfig(lr=0.5, adam_eps=1e-5), nn.Linear(3, 2).named_parameters())
    assert isinstance(optimizer, FusedAdam)
    assert optimizer.param_groups[0]["eps"] == 1e-5
