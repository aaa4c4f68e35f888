"""The numbers of an iteration and of an evaluation, for all who report them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import exp, isfinite
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationMetrics:
    """Numbers of a training iteration. The names are those of the metrics file."""

    iteration: int
    consumed_samples: int
    lm_loss: float
    grad_norm: float | None
    """None if the update was skipped."""
    learning_rate: float
    iteration_time_s: float
    tokens_per_second: float
    global_batch_size: int
    tflops_per_device: float
    """Model FLOPs: without those of recomputation."""
    mfu: float | None
    """Share of the device's peak; None where that is unknown."""
    loss_scale: float | None
    """None unless in fp16."""
    skipped_iterations: int
    """Over all runs."""
    params_norm: float | None = None
    """None unless asked for."""
    decoupled_learning_rate: float | None = None
    """Learning rate of the word embedding and of the output layer; None if it is not set apart."""
    num_zeros_in_grad: int | None = None
    """Before clipping; None unless asked for."""
    timers: Mapping[str, tuple[float, ...]] | None = None
    """Seconds of each phase of the iteration, of the ranks that were asked for; None if none were."""
    peak_memory_bytes: tuple[int, ...] | None = None
    """Most that a rank of each stage ever held; None in iterations in which it is not measured."""
    spiky_loss: bool = False
    """Whether the loss jumped above those before."""
    large_grads: bool = False
    """Whether the norm of the gradient did; False unless asked for."""

    @property
    def skipped(self) -> bool:
        """Whether a gradient that was no number kept the weights as they were."""
        return self.grad_norm is None

    def as_json(self) -> dict[str, Any]:
        """Return the object of the metrics file; JSON has no NaN, so a loss that is no number is null."""
        return asdict(self) | {"lm_loss": _or_none(self.lm_loss)}


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationMetrics:
    """Numbers of an evaluation."""

    iteration: int
    consumed_samples: int
    part: Literal["validation", "test"]
    lm_loss: float

    @property
    def perplexity(self) -> float:
        """Perplexity e**loss. The loss is capped at 20 as in Megatron, because e**20 is as good as infinite."""
        return exp(min(20.0, self.lm_loss))

    def as_json(self) -> dict[str, Any]:
        """Return the object of the metrics file, without the samples of training."""
        return {"iteration": self.iteration, f"{self.part}_lm_loss": _or_none(self.lm_loss)}


def _or_none(loss: float) -> float | None:
    return loss if isfinite(loss) else None
