"""Models of transformers, unmodified, train in token slices as they do on their own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from deepspeed_ext.transformers_layers import (
    gathered_state_dict,
    labelled_tokens,
    pipeline_layers,
    split_batch,
    summed_loss,
)
from tests.distributed import run_distributed
from tests.runtime.reference import relative_error
from tests.runtime.training import Setup, as_numpy, build
from tests.transformers_layers import models

CUT = (9, 1, 6, 8)
WHOLE = Setup(cut=(models.SEQ,), dtype="fp64")
SLICED = Setup(pp=2, cut=CUT, dtype="fp64")
SHARED = Setup(sp=2, cut=(10, 2, 4, 8), dtype="fp64")
RECOMPUTED = Setup(pp=2, cut=CUT, dtype="fp64", recompute=1, schedule="zero-bubble")


TILED = ("gpt2", "gemma2", "qwen3")
"""Models whose logits are computed for some tokens at a time: with tied words, soft caps, and a head of its own."""


def gradients(setup: Setup, kind: str, settings: dict[str, Any]) -> tuple[float, dict[str, np.ndarray]]:
    """Train one step: the loss, and the gradients of this rank's parameters by their names in the model."""
    model = models.model_of(kind, **settings)
    layers = pipeline_layers(model, tiled_logits=kind in TILED)
    engine = build(setup, layers=layers, loss_fn=summed_loss, split_batch=split_batch, activation_spec=None)
    loss = engine.train_batch(iter(models.batches())).item()
    seen = engine.optimizer.seen
    return loss, {name: as_numpy(seen[p]) for name, p in model.named_parameters() if p in seen}


@pytest.mark.parametrize(
    ("kind", "setup"),
    [
        ("llama", SLICED),
        ("qwen2", SLICED),
        ("gpt2", SLICED),
        ("llama", RECOMPUTED),
        ("gpt2", RECOMPUTED),
        ("mistral", SLICED),
        ("gemma2", RECOMPUTED),
        ("qwen3", SHARED),
    ],
)
def test_loss_and_gradients_are_those_of_the_plain_model(kind: str, setup: Setup) -> None:
    # With soft caps transformers computes the softmax of attention in fp32, whatever the model.
    tolerance = 1e-6 if kind == "gemma2" else 1e-12
    expected_loss, expected = models.plain_gradients(models.model_of(kind))
    found: dict[str, np.ndarray] = {}
    for loss, of_rank in run_distributed(gradients, setup.world_size, setup, kind, {}):
        assert loss == pytest.approx(expected_loss, rel=tolerance)
        found |= of_rank
    assert found.keys() == expected.keys()
    errors = {name: relative_error(found[name], expected[name]) for name in expected}
    assert {name: error for name, error in errors.items() if error > tolerance} == {}


def test_dropout_does_not_depend_on_token_slices() -> None:
    dropout = dict.fromkeys(models.NO_DROPOUT, 0.2)
    ((expected_loss, expected),) = run_distributed(gradients, 1, WHOLE, "gpt2", dropout)
    found: dict[str, np.ndarray] = {}
    for loss, of_rank in run_distributed(gradients, 2, RECOMPUTED, "gpt2", dropout):
        assert loss == pytest.approx(expected_loss, rel=1e-12)
        found |= of_rank
    assert found.keys() == expected.keys()
    assert max(relative_error(found[name], expected[name]) for name in expected) < 1e-12
    plain_loss, _ = models.plain_gradients(models.model_of("gpt2"))
    assert abs(plain_loss - expected_loss) > 1e-3


def _trained(directory: str) -> dict[str, Any]:
    """Train two steps in bf16, save the model, and evaluate."""
    model = models.model_of("gpt2")
    setup = Setup(pp=2, cut=CUT, dtype="bf16")
    keywords = {"loss_fn": summed_loss, "split_batch": split_batch, "loss_tokens": labelled_tokens}
    engine = build(setup, layers=pipeline_layers(model), activation_spec=None, **keywords)
    for step in range(2):
        engine.train_batch(iter(models.batches(step=step)))
    state = gathered_state_dict(engine, model)
    names = None if state is None else set(state)
    if state is not None:
        model.save_pretrained(directory, state_dict=state)
    _, outputs, _ = engine.eval_batch(iter(models.batches(1)), num_micro_batches=1, return_output_label=True)
    return {"outputs": None if outputs is None else as_numpy(outputs), "names": names}


def test_the_weights_of_all_stages_are_saved_as_transformers_does(tmp_path: Path) -> None:
    first, last = run_distributed(_trained, 2, str(tmp_path))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    assert first["names"] == {name for name, _ in loaded.named_parameters()}
    assert last["names"] is None
    logits = as_numpy(loaded(models.batches(1)[0]["input_ids"]).logits)
    assert relative_error(last["outputs"], logits) < 2e-2
    fresh = models.model_of("gpt2").bfloat16().eval()
    assert relative_error(as_numpy(fresh(models.batches(1)[0]["input_ids"]).logits), logits) > 0.1


def test_the_model_runs_on_its_own_again() -> None:
    model = models.model_of("gpt2", resid_pdrop=0.2).eval()
    tokens = torch.arange(12).unsqueeze(0)
    before = model(tokens).logits
    pipeline_layers(model)
    assert not model.training
    model.set_attn_implementation("sdpa")
    assert torch.equal(model(tokens).logits, before)
    assert not torch.equal(model.train()(tokens).logits, before)
