"""Stages that are computed again in the backward: the memory that they keep, and equal results."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from benchmarks.measuring.counters import LiveBytes
from deepspeed_ext.plan.ops import Op, OpKind
from deepspeed_ext.runtime.clocks import Observer
from deepspeed_ext.runtime.state.sequence_state import Past
from tests.distributed import run_distributed
from tests.runtime import models
from tests.runtime.training import ROWS, Setup, as_numpy, build, feed

CUT = (9, 1, 8, 6)
CALLS: list[tuple[str, int, bool]] = []
"""Calls of layers: name, first token, whether with a graph."""


class Noted(models.Block):
    """Notes when it runs."""

    def forward(self, hidden: Tensor, past: Past) -> Tensor:
        CALLS.append(("block", past.prefix_len, torch.is_grad_enabled()))
        return super().forward(hidden, past)


class Head(nn.Linear):
    """Notes when it runs."""

    def forward(self, hidden: Tensor) -> Tensor:
        CALLS.append(("head", -1, torch.is_grad_enabled()))
        return super().forward(hidden)


def _calls(keeps: bool) -> dict[str, Any]:
    layers = [LayerSpec(models.Embedding), LayerSpec(Noted), LayerSpec(Head, models.HIDDEN, models.VOCAB)]
    setup = Setup(cut=CUT, micro_batches=1)
    engine = build(
        setup,
        layers=layers,
        recompute_stages=True,
        preserve_rng_state=keeps,
        engine_keywords={"check_token_slices": False},
    )
    CALLS.clear()
    *_, outputs, labels = engine.train_batch(feed(engine, setup), return_output_label=True)
    trained = list(CALLS)
    CALLS.clear()
    engine.eval_batch(feed(engine, setup))
    (given,) = [labels for _, labels in feed(engine, setup)]
    return {
        "trained": trained,
        "evaluated": list(CALLS),
        "outputs": tuple(outputs.shape),
        "labels": torch.equal(labels, given),
    }


def test_heads_and_losses_are_computed_only_in_the_backward() -> None:
    ((once, whole),) = run_distributed(_calls_of_both, 1)
    starts = [0, 9, 10, 18]
    passing = [("block", start, False) for start in starts]
    again = [each for start in reversed(starts) for each in (("block", start, True), ("head", -1, True))]
    assert once["trained"] == [*passing, *again]
    # Numbers that a head may draw are drawn in the forward, as without recomputation.
    assert whole["trained"] == [*(each for call in passing for each in (call, ("head", -1, False))), *again]
    assert once["evaluated"] == [each for call in passing for each in (call, ("head", -1, False))]
    # Outputs are in the order of the tokens, though the last token slice computes its own first.
    assert once["outputs"] == (ROWS, models.SEQ, models.VOCAB) and once["labels"]


def _calls_of_both() -> list[dict[str, Any]]:
    return [_calls(keeps) for keeps in (False, True)]


class AtFirstBackward(Observer):
    """Notes the living bytes at the first backward of a batch."""

    def __init__(self, live: LiveBytes) -> None:
        self.live, self.bytes = live, None

    @contextmanager
    def op(self, op: Op) -> Iterator[None]:
        if op.kind is OpKind.BACKWARD and self.bytes is None:
            self.bytes = self.live.now
        yield


def _kept_bytes(recompute_stages: bool) -> int:
    setup = Setup(pp=2, cut=CUT, micro_batches=1, schedule="gpipe", tied=False, recompute_stages=recompute_stages)
    engine = build(setup, preserve_rng_state=False)
    engine.train_batch(feed(engine, setup))
    batch = feed(engine, setup)
    with LiveBytes() as live:
        watch = AtFirstBackward(live)
        with engine.observers.joined_by(watch):
            engine.train_batch(batch)
    return watch.bytes


def test_a_stage_keeps_only_its_input_keys_and_values() -> None:
    _, (kept, kept_with_graph) = (found["kept"] for found in on_two())
    tokens, layers = ROWS * models.SEQ, 2
    key_values = 2 * models.GROUPS * (models.HIDDEN // models.HEADS)
    assert kept == tokens * (models.HIDDEN + layers * key_values) * 4
    assert kept_with_graph > 5 * kept


class Dropping(models.Block):
    """Draws from torch's generator."""

    def forward(self, hidden: Tensor, past: Past) -> Tensor:
        return nn.functional.dropout(super().forward(hidden, past), 0.2, self.training)


class Second(nn.Module):
    """Changes only the second of three tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Dropping()

    def forward(self, given: tuple[Tensor, Tensor, Tensor], past: Past) -> tuple[Tensor, Tensor, Tensor]:
        constant, hidden, tokens = given
        return constant.detach(), self.inner(hidden, past) * constant, tokens


class Beginning(models.Embedding):
    """Three tensors of tokens: one that depends on no weight, hidden states, and the tokens."""

    def forward(self, tokens: Tensor, past: Past) -> tuple[Tensor, Tensor, Tensor]:
        return tokens[..., None] * 0.01 + 1.0, super().forward(tokens, past), tokens


class Ending(nn.Linear):
    """Logits of hidden states."""

    def forward(self, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return nn.functional.dropout(super().forward(given[1]), 0.2, self.training)


def _drawn(recompute: bool, schedule: str) -> tuple[float, dict[str, np.ndarray]]:
    layers = [LayerSpec(Beginning), *[LayerSpec(Second)] * 3, LayerSpec(Ending, models.HIDDEN, models.VOCAB)]
    setup = Setup(pp=2, cut=CUT, dtype="fp64", recompute_stages=recompute, schedule=schedule)
    keywords = {"engine_keywords": {"check_token_slices": False}, "partition": "uniform"}
    engine = build(setup, layers=layers, activation_spec=None, **keywords)
    torch.manual_seed(5)
    loss = engine.train_batch(feed(engine, setup)).item()
    seen = engine.optimizer.seen
    return loss, {name: as_numpy(seen[each]) for name, each in engine.module.named_parameters() if each in seen}


def _on_two() -> dict[str, Any]:
    drawn = [_drawn(recompute, schedule) for recompute in (False, True) for schedule in ("1f1b", "zero-bubble")]
    return {"kept": [_kept_bytes(recompute_stages) for recompute_stages in (True, False)], "drawn": drawn}


@cache
def on_two() -> list[dict[str, Any]]:
    return run_distributed(_on_two, 2)


def test_random_numbers_are_drawn_again_and_outputs_without_gradients_pass() -> None:
    """Generators of torch, tuples between stages of which some need no gradient, shapes that are sent."""
    for (loss, gradients), (_, parted), (loss_again, again), (_, parted_again) in (each["drawn"] for each in on_two()):
        assert loss_again == pytest.approx(loss, rel=1e-14)
        for one, other in ((gradients, again), (parted, parted_again)):
            assert one.keys() == other.keys() and one
            for name in one:
                np.testing.assert_allclose(one[name], other[name], rtol=0, atol=1e-14)
