"""The optimizer, and the schedules of its settings: the learning rate and the weight decay at every step."""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib import import_module
from math import cos, pi, sqrt
from typing import Any

import torch

from megatron_terapipe.config.training import LearningRateSteps, OptimizerConfig, TrainingConfig
from megatron_terapipe.model.embedding import AT_AN_END


def apex_fused_adam() -> Any | None:
    """Return FusedAdam of NVIDIA apex; None if it is not installed or cannot run.

    The package `apex` of PyPI is another one.
    """
    if not torch.cuda.is_available():
        return None
    try:
        # The kernels are an extension of their own: apex may be installed without it.
        import_module("amp_C")
        return import_module("apex.optimizers").FusedAdam
    except Exception:  # The other apex, or one built for another torch, may fail in any way.
        return None


DECAY_FACTOR = "weight_decay_factor"
"""Entry of a group of parameters: factor of the weight decay."""
APART = "learning_rate_apart"
"""Entry of a group of parameters: whether it has the word embedding and the output layer."""


def build_optimizer(
    config: OptimizerConfig, named_parameters: Iterable[tuple[str, torch.nn.Parameter]]
) -> torch.optim.Optimizer:
    """AdamW or SGD over groups: matrices decay; biases and norms do not, as in Megatron, but for norms of heads if set.

    With `--decoupled-lr` the word embedding and the output layer are a group of their own.
    """
    by_kind: dict[tuple[float, bool], list[torch.nn.Parameter]] = {}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            apart = config.decoupled_lr is not None and hasattr(parameter, AT_AN_END)
            of_heads = config.apply_wd_to_qk_layernorm and ("query_norm." in name or "key_norm." in name)
            # The bias of two adjacent matrices has two axes, too.
            is_matrix = parameter.dim() > 1 and not name.endswith("bias")
            by_kind.setdefault((float(of_heads or is_matrix), apart), []).append(parameter)
    # In the same order on all ranks.
    groups: list[dict[str, Any]] = [
        {
            "params": by_kind[decay, apart],
            "lr": config.ends[0] if apart else config.lr,
            "weight_decay": decay * config.weight_decay,
            DECAY_FACTOR: decay,
            APART: apart,
        }
        for decay, apart in sorted(by_kind, key=lambda kind: (-kind[0], kind[1]))
    ]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.sgd_momentum)
    betas = (config.adam_beta1, config.adam_beta2)
    fused_adam = apex_fused_adam()
    if fused_adam is not None:
        return fused_adam(groups, lr=config.lr, betas=betas, eps=config.adam_eps, adam_w_mode=True)
    # The fused step is one pass over the state, on CPUs as on GPUs.
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.adam_eps, fused=True)


def set_step_sizes(
    optimizer: torch.optim.Optimizer, *, learning_rate: float, of_ends: float, weight_decay: float
) -> None:
    """Use a learning rate and a weight decay from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = of_ends if group[APART] else learning_rate
        group["weight_decay"] = weight_decay * group[DECAY_FACTOR]


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningRateSchedule:
    """Linear warmup to `max_lr`, then decay to `min_lr` in one of Megatron's shapes.

    Steps are iterations or samples, the unit of the training.

    Example:
        >>> optimizer = OptimizerConfig(lr=1.0, lr_warmup_iters=2)
        >>> schedule = LearningRateSchedule.from_config(
        ...     optimizer, TrainingConfig(train_iters=6), global_batch_size=1, seq_length=8
        ... )
        >>> [schedule.at(step) for step in range(7)]
        [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """

    optimizer: OptimizerConfig
    max_lr: float
    min_lr: float
    steps: LearningRateSteps
    samples_per_step: int
    """The unit of Megatron; it has an effect without warmup."""

    @classmethod
    def from_config(
        cls, optimizer: OptimizerConfig, training: TrainingConfig, *, global_batch_size: int, seq_length: int
    ) -> "LearningRateSchedule":
        """Return the schedule of a configuration."""
        samples_per_step = 1 if training.unit == "samples" else global_batch_size
        return cls(
            optimizer=optimizer,
            max_lr=optimizer.lr,
            min_lr=optimizer.min_lr,
            steps=LearningRateSteps.of(optimizer, training, tokens_per_step=samples_per_step * seq_length),
            samples_per_step=samples_per_step,
        )

    def at(self, step: int) -> float:
        """Learning rate of the update that follows `step` completed steps.

        As in Megatron, the first update of a run is `at(0)`, which is `lr_warmup_init` if there is a warmup.
        """
        start, style, warmup = self.optimizer.lr_warmup_init, self.optimizer.lr_decay_style, self.steps.warmup
        if warmup and step <= warmup:
            return start + (self.max_lr - start) * step / warmup
        if style == "constant":
            return self.max_lr
        if step > self.steps.decay:
            return self.min_lr
        if style == "inverse-square-root":
            # Equal to max_lr at the end of the warmup, of any length.
            risen, now = (max(each * self.samples_per_step, 1) for each in (warmup, step))
            return max(self.min_lr, self.max_lr * sqrt(risen / now))
        return self.min_lr + self._remaining(step) * (self.max_lr - self.min_lr)

    def _remaining(self, step: int) -> float:
        """Return the remaining part of the decay at a step after the warmup, in [0, 1]."""
        style: str = self.optimizer.lr_decay_style
        begin, length = self.steps.warmup, self.steps.decay - self.steps.warmup
        if style == "WSD":
            style, length = self.optimizer.lr_wsd_decay_style, self.steps.wsd_decay
            begin = self.steps.decay - length
        progress = max(0.0, (step - begin) / length)
        if style == "linear":
            return 1 - progress
        if style == "cosine":
            return (1 + cos(pi * progress)) / 2
        if style == "exponential":
            return 2 * 0.5**progress - 1
        assert style == "minus_sqrt", style
        return 1 - sqrt(progress)


def schedule_facts(optimizer: OptimizerConfig, training: TrainingConfig, *, tokens_per_step: int) -> dict[str, Any]:
    """Return the fields that set learning rate and weight decay over a training, with its lengths in steps."""
    given = {
        name: value
        for name, value in asdict(optimizer).items()
        if re.search(r"(^|_)lr(_|$)|weight_decay", name) and not name.endswith(("_fraction", "_tokens"))
    }
    steps = LearningRateSteps.of(optimizer, training, tokens_per_step=tokens_per_step)
    return given | {f"lr_warmup_{training.unit}": steps.warmup, f"lr_decay_{training.unit}": steps.decay}


def weight_decay_at(step: int, optimizer: OptimizerConfig, training: TrainingConfig) -> float:
    """Weight decay of the update that follows `step` completed steps: constant, or rising in one of Megatron's shapes.

    Example:
        >>> rising = OptimizerConfig(
        ...     lr=1.0, start_weight_decay=0.0, end_weight_decay=0.4, weight_decay_incr_style="linear"
        ... )
        >>> [weight_decay_at(step, rising, TrainingConfig(train_iters=4)) for step in range(6)]
        [0.0, 0.1, 0.2, 0.30000000000000004, 0.4, 0.4]
    """
    constant, style = optimizer.weight_decay, optimizer.weight_decay_incr_style
    start = constant if optimizer.start_weight_decay is None else optimizer.start_weight_decay
    end = constant if optimizer.end_weight_decay is None else optimizer.end_weight_decay
    if style == "constant" or step > training.length:
        return end
    progress = step / training.length
    risen = progress if style == "linear" else (1 + cos(pi * (1 - progress))) / 2
    return start + risen * (end - start)
