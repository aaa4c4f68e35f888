"""Models of transformers, unmodified, train in token slices as they do on their own."""

from typing import Any

import numpy as np
import pytest
import torch

from deepspeed_ext.transformers_layers import pipeline_layers, split_batch, summed_loss
from tests.distributed import run_distributed
from tests.runtime.reference import relative_error
from tests.runtime.training import Setup, as_numpy, build
from tests.transformers_layers import models

CUT = (9, 1, 6, 8)
WHOLE = Setup(cut=(models.SEQ,), dtype="fp64")
SLICED = Setup(pp=2, cut=CUT, dtype="fp64")
RECOMPUTED = Setup(pp=2, cut=CUT, dtype="fp64", recompute=1, schedule="zero-bubble")


def gradients(setup: Setup, kind: str, settings: dict[str, Any]) -> tuple[float, dict[str, np.ndarray]]:
    """Train one step: the loss, and the gradients of this rank's parameters by their names in the model."""
    model = models.model_of(kind, **settings)
    engine = build(
        setup, layers=pipeline_layers(model), loss_fn=summed_loss, split_batch=split_batch, activation_spec=None
    )
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
        ("qwen3", SLICED),
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


def test_the_model_runs_on_its_own_again() -> None:
    model = models.model_of("gpt2", resid_pdrop=0.2).eval()
    tokens = torch.arange(12).unsqueeze(0)
    before = model(tokens).logits
    pipeline_layers(model)
    assert not model.training
    model.set_attn_implementation("sdpa")
    assert torch.equal(model(tokens).logits, before)
    assert not torch.equal(model.train()(tokens).logits, before)
