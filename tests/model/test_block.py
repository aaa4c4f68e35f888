"""A transformer layer and its activations against their formulas: parts left out, dropout, recomputation."""

from collections.abc import Callable
from dataclasses import replace
from typing import get_args, get_type_hints

import pytest
import torch
from torch import Tensor, nn

from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.pointwise import Pointwise
from deepspeed_ext.runtime.attention.documents import Documents
from deepspeed_ext.runtime.attention.positional_dropout import DropoutPlace
from deepspeed_ext.runtime.state.sequence_state import SequenceState
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.layers import BlockShape
from megatron_terapipe.inference import WholeModel
from megatron_terapipe.model.attention import SelfAttention
from megatron_terapipe.model.block import DropoutSite, TransformerBlock
from megatron_terapipe.model.mlp import Activation
from megatron_terapipe.model.norm import LayerNorm, RMSNorm
from megatron_terapipe.model.tensor_parallel import TensorParallelRanks
from tests.model import plain
from tests.model.configs import MODELS, SEQ, llama_config, model_config
from tests.model.plain import hidden_state, in_token_slices, random_weights
from tests.runtime.attention.masks import attention_keep_mask, keep_mask


def assert_same_with_gradients(found: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    coefficients = torch.linspace(-1, 1, found.numel(), dtype=found.dtype).view_as(found)
    of_found, of_expected = (torch.autograd.grad((each * coefficients).sum(), inputs) for each in (found, expected))
    scale = max(gradient.abs().max().item() for gradient in of_expected)
    torch.testing.assert_close(of_found, of_expected, rtol=1e-12, atol=1e-12 * scale)


def with_gate(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x[..., : x.shape[-1] // 2]) * x[..., x.shape[-1] // 2 :]


WRITTEN_OUT = {"relu": lambda x: torch.maximum(x, torch.zeros_like(x)), **plain.ACTIVATIONS}
WRITTEN_OUT |= {name: with_gate(function) for name, function in plain.GATES.items()}


def inputs_of(dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (3 * torch.randn(2, 5, 16, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()


def test_every_activation_of_the_model_section_is_tested() -> None:
    assert set(get_args(get_type_hints(ModelConfig)["activation"])) == set(WRITTEN_OUT)


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_values_and_gradients(name: str) -> None:
    inputs = inputs_of()
    found, expected = Activation(model_config(activation=name))(inputs), WRITTEN_OUT[name](inputs)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-14)
    coefficients = torch.linspace(-1, 2, found.numel(), dtype=torch.float64).view_as(found)
    of_found, of_expected = (torch.autograd.grad((each * coefficients).sum(), inputs) for each in (found, expected))
    torch.testing.assert_close(of_found, of_expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", plain.GATES)
def test_the_gradient_of_a_gate_with_a_view_as_input(name: str) -> None:
    columns_first = inputs_of().detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    assert not columns_first.is_contiguous()
    assert torch.autograd.gradcheck(Activation(model_config(activation=name)), columns_first)


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_bf16_stays_bf16(name: str) -> None:
    inputs = inputs_of(torch.bfloat16)
    output = Activation(model_config(activation=name))(inputs)
    output.sum().backward()
    assert output.dtype is inputs.grad.dtype is torch.bfloat16
    # Two roundings of the value, of relative size 2^-8 or less each, and one of the other factor.
    torch.testing.assert_close(output.double(), WRITTEN_OUT[name](inputs.double()), rtol=2**-6, atol=2**-7)


CUTS = [(SEQ,), (13, 1, 18)]


def block_of(model: ModelConfig, shape: BlockShape, *, recompute_cheap: bool = False) -> TransformerBlock:
    layer = TransformerBlock(model, shape, TensorParallelRanks(), recompute_cheap=recompute_cheap)
    random_weights(layer)
    return layer


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_attention_and_mlp_are_added_to_the_residual_stream(name: str, cut: tuple[int, ...]) -> None:
    model = MODELS[name]
    for shape in {*model.blocks, BlockShape(num_key_value_heads=0, ffn_hidden_size=0)}:
        layer = block_of(model, shape)
        hidden = hidden_state(32, SEQ).requires_grad_()
        expected = plain.block(layer, model, shape, hidden)
        assert_same_with_gradients(in_token_slices(layer, hidden, cut), expected, [hidden, *layer.parameters()])


def test_documents_with_continued_positions_differ_only_by_rotations() -> None:
    """A rotation of a whole document by its start changes no score."""
    model, hidden = llama_config(), hidden_state(32, SEQ)
    layer = random_weights(SelfAttention(model, model.blocks[0], TensorParallelRanks()))
    restarting, continued = (
        in_token_slices(
            layer, hidden, (13, 1, 18), documents=Documents(((0, 5, 13, 14), (0, 20)), positions_restart=restart)
        )
        for restart in (True, False)
    )
    torch.testing.assert_close(restarting, continued, rtol=1e-10, atol=1e-11)


def test_a_later_token_changes_no_earlier_logit() -> None:
    for name, model in MODELS.items():
        whole = WholeModel(model).double()
        tokens = torch.randint(0, 257, (1, SEQ), generator=torch.Generator().manual_seed(0))
        changed = tokens.clone()
        changed[0, 20] = (changed[0, 20] + 1) % 257
        with torch.no_grad():
            states = [SequenceState(TokenSlices((SEQ,))) for _ in range(2)]
            before, after = (
                whole(each, state)[..., :257] for each, state in zip((tokens, changed), states, strict=True)
            )
        assert torch.equal(before[:, :20], after[:, :20]), name
        # All later tokens see it, if any layer attends at all.
        assert torch.all((before[:, 20:] - after[:, 20:]).abs().amax(-1) > 0), name


class TestDropout:
    """At site 0 the probabilities of attention, then the terms that attention and MLP add to the residual stream."""

    LAYER, SEED, ROWS = 3, 7, (5, 9)  # as `in_token_slices` has it, but the layer

    def model(self, **given: object) -> ModelConfig:
        return llama_config(hidden_dropout=0.25, attention_dropout=0.4, **given)

    def masked(self, values: Tensor, site: str) -> Tensor:
        if site.startswith("head"):
            place = DropoutPlace.at(self.SEED, self.LAYER, 0, self.ROWS, 0)
            rows = place.rows(SEQ, values.device)
            (head,) = attention_keep_mask(rows, int(site.removeprefix("head ")), 1, 0, SEQ, 0.4).unbind(1)
            return values * head / 0.6
        place = DropoutPlace.at(self.SEED, self.LAYER, {"attention": 2, "mlp": 3}[site], self.ROWS, 0)
        return values * keep_mask(place.rows(SEQ, values.device), 0, values.shape[-1], 0.25) / 0.75

    def test_evaluation_has_no_dropout(self) -> None:
        model = self.model()
        layer, (shape, *_) = block_of(model, model.blocks[0]), model.blocks
        hidden = hidden_state(32, SEQ)
        training = in_token_slices(layer, hidden, (SEQ,))
        evaluated = in_token_slices(layer.eval(), hidden, (SEQ,))
        without = plain.block(layer, model, shape, hidden)
        torch.testing.assert_close(evaluated, without, rtol=1e-12, atol=1e-12)
        assert (training - evaluated).abs().max() > 0.1

    @pytest.mark.parametrize("probabilities", [(0.25, 0.0), (0.0, 0.4)])
    def test_each_probability_applies_to_its_sites(self, probabilities: tuple[float, float]) -> None:
        hidden_dropout, attention_dropout = probabilities
        model = replace(self.model(), hidden_dropout=hidden_dropout, attention_dropout=attention_dropout)

        def masked(values: Tensor, site: str) -> Tensor:
            probability = attention_dropout if site.startswith("head") else hidden_dropout
            return self.masked(values, site) if probability else values

        layer = block_of(model, model.blocks[0])
        hidden = hidden_state(32, SEQ)
        found = in_token_slices(layer, hidden, (13, 1, 18), number=self.LAYER)
        expected = plain.block(layer, model, model.blocks[0], hidden, masked)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)

    def test_sites_layers_and_rows_have_masks_of_their_own(self) -> None:
        ones = torch.ones(2, SEQ, 64)
        masks = []
        for layer in (0, 1):
            past = SequenceState(TokenSlices((SEQ,)), seed=7, sequences=(5, 9)).past(layer, 0)
            masks += [past.dropout(ones, 0.5, site=site)[row] for site in DropoutSite for row in (0, 1)]
        assert len({tuple(mask.flatten().tolist()) for mask in masks}) == len(masks) == 12


@pytest.mark.parametrize("name", MODELS)
def test_functions_of_devices_that_compile_change_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There sums and norms, and rotations and writes of keys and values, are one function each; here as written."""
    model, results = MODELS[name], []
    for shape in model.blocks:
        for compiled in (False, True):
            monkeypatch.setattr(Pointwise, "is_compiled_on", lambda *_, compiled=compiled: compiled)
            monkeypatch.setattr(Pointwise, "__call__", lambda self, *arguments: self.function(*arguments))
            layer = block_of(model, shape).float()
            hidden = hidden_state(32, SEQ).float().requires_grad_()
            output = in_token_slices(layer, hidden, (13, 1, 18))
            output.square().sum().backward()
            results.append([output.detach(), hidden.grad, *(parameter.grad for parameter in layer.parameters())])
        for one, other in zip(*results[-2:], strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("name", MODELS)
def test_recomputation_changes_no_bit(name: str) -> None:
    """Over two micro-batches of three token slices, so that weight gradients also add up in place.

    Gradients of attention and MLP go through a norm that they share together, or each when it is recomputed: those are
    the same but for rounding.
    """
    model = MODELS[name]
    for shape in model.blocks:
        layers = [block_of(model, shape, recompute_cheap=recompute).float() for recompute in (False, True)]
        results = []
        for layer in layers:
            seen = []
            for seed in (1, 2):
                hidden = hidden_state(32, SEQ, seed).float().requires_grad_()
                output = in_token_slices(layer, hidden, (13, 1, 18))
                output.square().sum().backward()
                seen += [output.detach(), hidden.grad]
            results.append([*seen, *(parameter.grad for parameter in layer.parameters())])
        for kept, recomputed in zip(*results, strict=True):
            assert model.shared_block_norm or torch.equal(kept, recomputed)
            torch.testing.assert_close(kept, recomputed, rtol=1e-6, atol=1e-6 * kept.abs().max().item())


def test_in_bf16_a_weight_less_1_keeps_digits_that_1_would_swallow() -> None:
    model = model_config(hidden_size=12, apply_layernorm_1p=True, layernorm_epsilon=1e-12)
    norm = RMSNorm(model, TensorParallelRanks()).to(torch.bfloat16)
    norm.weight.data.fill_(2**-10)
    hidden = torch.full((1, 1, 12), 255.0, dtype=torch.bfloat16)
    hidden[..., ::2] *= -1
    assert torch.equal(norm(hidden), hidden / 255)  # 1 + 2^-10 is rounded once, at the end
    norm.weight.data.fill_(2**-7 - 2**-12)
    assert torch.all(norm(hidden).abs() == 1 + 2**-7)


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_in_bf16_the_mean_of_a_norm_is_taken_in_fp32(kind: type[nn.Module]) -> None:
    """Each result is off by the roundings of its few last steps, however wide the hidden state."""
    model, hidden = model_config(hidden_size=4096), hidden_state(4096, 1).bfloat16()
    norm = kind(model, TensorParallelRanks()).to(torch.bfloat16)
    found, exact = norm(hidden), kind(model, TensorParallelRanks()).double()(hidden.double())
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-7, atol=2**-9)
    found.sum().backward()
    assert norm.weight.grad.dtype is torch.bfloat16


def test_rmsnorm_of_fp16_squares_in_fp32() -> None:
    norm = random_weights(RMSNorm(model_config(), TensorParallelRanks())).half()
    hidden = torch.full((1, 1, 32), 1000.0, dtype=torch.float16)  # its square is no fp16
    torch.testing.assert_close(norm(hidden)[0, 0], norm.weight, rtol=2**-10, atol=0)
