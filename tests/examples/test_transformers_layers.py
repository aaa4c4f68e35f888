"""Models of transformers, unmodified, train in token slices as they do on their own; others are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel, T5Config, T5ForConditionalGeneration

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.slicing import TokenSlices
from examples.transformers_layers import (
    TiledLogits,
    gathered_state_dict,
    labelled_tokens,
    pipeline_layers,
    split_batch,
    summed_loss,
)
from tests.distributed import run_distributed
from tests.examples import transformers_models as models
from tests.examples.transformers_models import model_of
from tests.runtime.reference import relative_error
from tests.runtime.training import Setup, as_numpy, build

CUT = (9, 1, 6, 8)
WHOLE = Setup(cut=(models.SEQ,), dtype="fp64")
SLICED = Setup(pp=2, cut=CUT, dtype="fp64")
SHARED = Setup(sp=2, cut=(10, 2, 4, 8), dtype="fp64")
RECOMPUTED = Setup(pp=2, cut=CUT, dtype="fp64", recompute=1, schedule="zero-bubble")
TILED = ("gpt2", "gemma2", "qwen3")
"""Models whose logits are computed for some tokens at a time: with tied words, soft caps, and a head of its own."""


def gradients(setup: Setup, kind: str, settings: dict[str, Any]) -> tuple[float, dict[str, np.ndarray]]:
    """Train one step: the loss, and the gradients of this rank's parameters by their names in the model."""
    model = model_of(kind, **settings)
    layers = pipeline_layers(model, tiled_logits=kind in TILED)
    engine = build(setup, layers=layers, loss_fn=summed_loss, split_batch=split_batch, activation_spec=None)
    loss = engine.train_batch(iter(models.batches())).item()
    seen = engine.optimizer.seen
    return loss, {name: as_numpy(seen[p]) for name, p in model.named_parameters() if p in seen}


CASES = [
    *(("llama", SLICED), ("qwen2", SLICED), ("gpt2", SLICED), ("llama", RECOMPUTED), ("gpt2", RECOMPUTED)),
    *(("mistral", SLICED), ("gemma2", RECOMPUTED), ("qwen3", SHARED)),
]


DROPOUT = dict.fromkeys(models.NO_DROPOUT, 0.2)


def _compute(directory: str) -> dict[str, Any]:
    """What the tests ask of two ranks: importing transformers takes a rank seconds."""
    return {
        "plain": [gradients(setup, kind, {}) for kind, setup in CASES],
        "dropout": gradients(RECOMPUTED, "gpt2", DROPOUT),
        "trained": _trained(directory),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the model that the ranks save."""
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def computed(saved: Path) -> list[dict[str, Any]]:
    """Results by rank."""
    return run_distributed(_compute, 2, str(saved))


@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{kind}-{setup}" for kind, setup in CASES])
def test_loss_and_gradients_are_those_of_the_plain_model(case: int, computed: list[dict[str, Any]]) -> None:
    kind, _ = CASES[case]
    # With soft caps transformers computes the softmax of attention in fp32, whatever the model.
    tolerance = 1e-6 if kind == "gemma2" else 1e-12
    expected_loss, expected = models.plain_gradients(model_of(kind))
    found: dict[str, np.ndarray] = {}
    for loss, of_rank in (of_all["plain"][case] for of_all in computed):
        assert loss == pytest.approx(expected_loss, rel=tolerance)
        found |= of_rank
    assert found.keys() == expected.keys()
    errors = {name: relative_error(found[name], expected[name]) for name in expected}
    assert {name: error for name, error in errors.items() if error > tolerance} == {}


def test_dropout_does_not_depend_on_token_slices(computed: list[dict[str, Any]]) -> None:
    ((expected_loss, expected),) = run_distributed(gradients, 1, WHOLE, "gpt2", DROPOUT)
    found: dict[str, np.ndarray] = {}
    for loss, of_rank in (of_all["dropout"] for of_all in computed):
        assert loss == pytest.approx(expected_loss, rel=1e-12)
        found |= of_rank
    assert found.keys() == expected.keys()
    assert max(relative_error(found[name], expected[name]) for name in expected) < 1e-12
    plain_loss, _ = models.plain_gradients(model_of("gpt2"))
    assert abs(plain_loss - expected_loss) > 1e-3


def _trained(directory: str) -> dict[str, Any]:
    """Train two steps in bf16, save the model, and evaluate."""
    model = model_of("gpt2")
    setup = Setup(pp=2, cut=CUT, dtype="bf16")
    keywords = {"loss_fn": summed_loss, "split_batch": split_batch, "loss_tokens": labelled_tokens}
    keywords["optimizer"] = lambda parameters: torch.optim.SGD(parameters, lr=1.0)
    engine = build(setup, layers=pipeline_layers(model), activation_spec=None, **keywords)
    for step in range(2):
        engine.train_batch(iter(models.batches(step=step)))
    state = gathered_state_dict(engine, model)
    names = None if state is None else set(state)
    if state is not None:
        model.save_pretrained(directory, state_dict=state)
    _, outputs, _ = engine.eval_batch(iter(models.batches(1)), num_micro_batches=1, return_output_label=True)
    return {"outputs": None if outputs is None else as_numpy(outputs), "names": names}


def test_the_weights_of_all_stages_are_saved_as_transformers_does(saved: Path, computed: list[dict[str, Any]]) -> None:
    first, last = (of_rank["trained"] for of_rank in computed)
    loaded = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.bfloat16).eval()
    assert first["names"] == {name for name, _ in loaded.named_parameters()}
    assert last["names"] is None
    logits = as_numpy(loaded(models.batches(1)[0]["input_ids"]).logits)
    assert relative_error(last["outputs"], logits) < 2e-2
    fresh = model_of("gpt2").bfloat16().eval()
    assert relative_error(as_numpy(fresh(models.batches(1)[0]["input_ids"]).logits), logits) > 0.1


def test_the_model_runs_on_its_own_again() -> None:
    model = model_of("gpt2", resid_pdrop=0.2).eval()
    tokens = torch.arange(12).unsqueeze(0)
    before = model(tokens).logits
    pipeline_layers(model)
    assert not model.training
    model.set_attn_implementation("sdpa")
    assert torch.equal(model(tokens).logits, before)
    assert not torch.equal(model.train()(tokens).logits, before)


THREE = TokenSlices((3, 1, 2))
TOKENS = torch.arange(12).reshape(2, 6)


def batch(**changes: Any) -> dict[str, Any]:
    """Row 1 ends with two tokens of padding."""
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1, 4:] = 0
    return {"input_ids": TOKENS, "labels": TOKENS.masked_fill(mask == 0, -100), "attention_mask": mask} | changes


def test_token_slices_sum_to_the_mean_over_labelled_tokens() -> None:
    labels = batch()["labels"].clone()
    labels[:, :4] = -100  # the first token slice has no label at all
    logits = torch.randn(2, 6, 12, dtype=torch.float64)
    parts = split_batch(batch(labels=labels), THREE)
    assert torch.equal(torch.cat([part.inputs for part in parts], dim=1), TOKENS)
    losses = [
        summed_loss(logits[:, start:end], part.labels) * part.loss_weight
        for part, (start, end) in zip(parts, THREE.bounds(), strict=True)
    ]
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert sum(losses).item() == pytest.approx(expected.item(), rel=1e-14)
    assert losses[0] == 0


def test_a_mask_may_be_left_out_and_entries_may_be_none() -> None:
    plain = split_batch({"input_ids": TOKENS, "labels": TOKENS}, THREE)
    parts = split_batch({"input_ids": TOKENS, "labels": TOKENS, "attention_mask": None, "token_type_ids": None}, THREE)
    assert plain[0].loss_weight == parts[0].loss_weight == 1 / 10
    assert plain[2].labels.tolist() == [[5, -100], [11, -100]]
    assert labelled_tokens(batch()) == 5 + 3


def test_losses_of_half_precision_are_computed_in_fp32() -> None:
    logits = torch.randn(1, 2, 5, dtype=torch.bfloat16)
    assert summed_loss(logits, torch.tensor([[1, -100]])).dtype == torch.float32


LEFT = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]])


@pytest.mark.parametrize(
    ("yielded", "said"),
    [
        ((TOKENS, TOKENS), "the data loader yields tuple"),
        ({"input_ids": TOKENS}, "the data loader yields 'input_ids'"),
        (batch(position_ids=TOKENS), "yields 'position_ids'"),
        (batch(attention_mask=LEFT), "in row 1, and causal attention would see them: pad on the right"),
        (batch(attention_mask=torch.ones(2, 1, 6, 6)), "attention_mask has the shape (2, 1, 6, 6)"),
        (batch(labels=TOKENS), "labels of padding count in the loss: give them the label -100"),
        (batch(labels=torch.full((2, 6), -100)), "has no label but -100"),
        ({"input_ids": TOKENS[:, :5], "labels": TOKENS[:, :5]}, "do not have the 6 tokens"),
    ],
)
def test_other_batches_are_refused_in_one_line(yielded: Any, said: str) -> None:
    with pytest.raises(UserError) as refused:
        split_batch(yielded, THREE)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


HEAD_DIM = {"head_dim": 8}
CAPPED = HEAD_DIM | {"sliding_window": 4, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0}
"""A window shorter than the token slices that are compared, and soft caps that bend every score and logit."""


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("qwen3", HEAD_DIM),
        ("mistral", {"sliding_window": None}),
        ("gpt_neox", {}),
        ("phi", {}),
        ("phi3", {"eos_token_id": 0}),
        ("olmo2", {"eos_token_id": 0}),
        ("starcoder2", {"eos_token_id": 0, "bos_token_id": 0}),
        ("gemma", HEAD_DIM),
        ("gemma2", CAPPED),
        ("gemma3_text", HEAD_DIM | {"sliding_window": 4}),
        ("smollm3", {"eos_token_id": 0, "bos_token_id": 0}),
    ],
)
def test_models_of_these_structures_are_taken(kind: str, settings: dict[str, Any]) -> None:
    assert len(pipeline_layers(model_of(kind, **settings))) >= 6


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_any_precision_is_taken(dtype: torch.dtype) -> None:
    assert len(pipeline_layers(model_of("llama").to(dtype))) == 6


def t5() -> PreTrainedModel:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 97}
    return T5ForConditionalGeneration(T5Config(**sizes))


def checkpointed() -> PreTrainedModel:
    model = model_of("llama")
    model.model.layers[0].gradient_checkpointing = True
    return model


class ScaledNorm(nn.LayerNorm):
    """Not what the plain model computes once the layers have been found."""

    calls = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(hidden) * self.calls


def limited() -> PreTrainedModel:
    """Its configuration says that logits are limited, and its layers, unlike those of Gemma, do not do so."""
    model = model_of("llama")
    model.config.final_logit_softcapping = 30.0
    return model


def miscounting() -> PreTrainedModel:
    model = model_of("gpt2")
    model.transformer.ln_f = ScaledNorm(32)
    return model


class Noise(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(hidden, 0.5, self.training)


def noisy() -> PreTrainedModel:
    model = model_of("llama")
    model.model.layers[1].mlp.act_fn = Noise()
    return model


LONG_ROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 1e4}
OPENAI = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
"""Its layers return lists."""
DYNAMIC_ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: nn.Linear(2, 2), "Linear is not a model of transformers"),
        (t5, "has an encoder or cross-attention"),
        (lambda: model_of("gpt2", add_cross_attention=True), "has an encoder or cross-attention"),
        (checkpointed, "gradient_checkpointing_disable"),
        (lambda: model_of("mixtral", output_router_logits=True), "config.output_router_logits = False"),
        (lambda: model_of("llama", rope_parameters=DYNAMIC_ROPE), "dynamic rotary embeddings"),
        (lambda: model_of("phi3", eos_token_id=0, rope_parameters=LONG_ROPE), "longrope rotary embeddings"),
        (lambda: model_of("bloom", eos_token_id=0), "is built in a way that is not known here"),
        (lambda: model_of("falcon", eos_token_id=0), "does not call its attention by transformers' AttentionInterface"),
        (lambda: model_of("stablelm", eos_token_id=0), "layers that keep `past` from it cannot be trained here"),
        (lambda: model_of("gpt_oss", **HEAD_DIM), "attends with s_aux"),
        (lambda: model_of("mamba"), "has layers of the type linear_attention"),
        (limited, "computes logits that its layers in token slices do not"),
        (miscounting, "computes logits that its layers in token slices do not"),
        (noisy, "draws random numbers in its layers"),
        (lambda: model_of("openai-gpt", **OPENAI), "OpenAIGPTLMHeadModel"),
        (lambda: model_of("llama", attn_implementation="eager").double(), 'load it with attn_implementation="sdpa"'),
    ],
)
def test_other_models_are_refused_in_one_line(make: Callable[[], nn.Module], said: str) -> None:
    model = make()
    with pytest.raises(UserError) as refused:
        pipeline_layers(model)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    if isinstance(model, PreTrainedModel):
        assert model.config._attn_implementation != "token_slices"


HIDDEN = torch.randn(2, 7, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([[3, -100, 1, 0, 10, 4, 4], [-100, -100, -100, 2, 9, 9, -100]])


def head() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(8, 11, bias=False, dtype=torch.float64)


@pytest.mark.parametrize("at_once", [1, 44, 1000])
def test_tiles_change_nothing(at_once: int) -> None:
    whole, tiled = head(), head()
    hidden, same = (HIDDEN.clone().requires_grad_() for _ in range(2))
    expected = summed_loss(whole(hidden), LABELS)
    found = TiledLogits(same, tiled, 11).summed_loss(LABELS, at_once=at_once)
    expected.backward()
    found.backward()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(same.grad, hidden.grad, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(tiled.weight.grad, whole.weight.grad, rtol=1e-12, atol=1e-15)


def test_logits_are_computed_for_a_few_tokens_at_a_time_and_again_in_the_backward() -> None:
    lengths, projection = [], head()

    def project(hidden: torch.Tensor) -> torch.Tensor:
        lengths.append(hidden.shape[1])
        return projection(hidden)

    logits = TiledLogits(HIDDEN.clone().requires_grad_(), project, 11)
    loss = logits.summed_loss(LABELS, at_once=2 * 11 * 3)
    assert lengths == [3, 3, 1]
    loss.backward()
    assert sorted(lengths) == [1, 1, 3, 3, 3, 3]
    assert summed_loss(logits, LABELS).item() == pytest.approx(loss.item(), rel=1e-12)
