"""Whether an engine computes what plain torch does: losses and gradients of the same step."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.engines.pipelines.engine import Engine
from benchmarks.measuring.live_bytes import LiveBytes

TOLERANCE = 1e-5
"""Largest relative difference of engines that agree, in fp32: they add the same numbers up in other orders."""


@dataclass(frozen=True)
class Step:
    """One step, watched."""

    loss: float | None
    """Mean over the micro-batches; None on a rank that knows none."""
    gradients: Mapping[str, Tensor]
    """Those the optimizer was given, by the names of the weights, each of its weight's shape [...]."""
    peak_bytes: int
    """Most bytes alive at once of those that the step made: activations, gradients, buffers."""


def take_weights(engine: Engine, weights: Mapping[str, Tensor]) -> None:
    """Give an engine the weights that all start from.

    Args:
        weights: by name, each [...].
    """
    with torch.no_grad():
        for name, weight in engine.weights.items():
            weight.copy_(weights[name].view_as(weight))


def watched_step(engine: Engine) -> Step:
    """Run a step, and keep what is compared of it."""
    gradients: dict[str, Tensor] = {}

    def keep(*_: object) -> None:
        gradients.update({name: _gradient(weight) for name, weight in engine.weights.items()})

    handle = engine.optimizer.register_step_pre_hook(keep)
    with LiveBytes() as live:
        loss = engine.step()
    handle.remove()
    return Step(loss, gradients, live.peak)


def _gradient(weight: nn.Parameter) -> Tensor:
    if weight.grad is None:
        raise RuntimeError("a weight has no gradient when the optimizer steps")
    return weight.grad.detach().clone()


def largest_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest difference of two sets of gradients, as a share of the largest element of each gradient.

    Args:
        found: gradients by name, each [...].
        expected: those of plain torch, of these names and maybe more, each with as many elements.
    """
    worst = 0.0
    for name, gradient in found.items():
        reference = expected[name].view_as(gradient)
        worst = max(worst, ((gradient - reference).abs().max() / reference.abs().max()).item())
    return worst
