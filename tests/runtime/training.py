"""Functions that ranks of the runtime's tests run: build an engine for a setup, train it, and return its results."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator

from deepspeed_ext.plan.layout import ParallelLayout
from deepspeed_ext.plan.ops import Placement
from deepspeed_ext.plan.schedules import Schedule
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.channels import TensorSpec
from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from deepspeed_ext.runtime.initialize import initialize
from deepspeed_ext.runtime.module import TokenSlicePipelineModule
from tests.runtime import models

ROWS = 2
LONG_STEP = 2.0**20
"""A learning rate with which (before - after) / LONG_STEP is the gradient to the last digits."""


@dataclass(frozen=True)
class Setup:
    """One way to train the small transformer. Its text form is the id of its tests."""

    pp: int = 1
    dp: int = 1
    sp: int = 1
    tp: int = 1
    ep: int = 1
    cut: tuple[int, ...] = (models.SEQ,)
    micro_batches: int = 2
    schedule: str | Schedule = "1f1b"
    model_chunks: int = 1
    placement: Placement = Placement.LOOPED
    tied: bool = True
    zero: int = 0
    dtype: str = "fp32"
    recompute: int = 0
    recompute_stages: bool = False
    num_blocks: int = 4
    stateful: bool = False
    accumulate: str | None = None
    config: tuple[tuple[str, Any], ...] = field(default=(), repr=False)

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def layout(self) -> ParallelLayout:
        return ParallelLayout(
            pipeline_parallel_size=self.pp,
            data_parallel_size=self.dp,
            sequence_parallel_size=self.sp,
            tensor_parallel_size=self.tp,
            num_token_slices=len(self.cut),
            expert_parallel_size=self.ep,
        )

    def __str__(self) -> str:
        parts = [f"pp{self.pp}", f"dp{self.dp}", f"m{self.micro_batches}", "cut" + "_".join(map(str, self.cut))]
        sizes = {"sp": self.sp, "tp": self.tp, "ep": self.ep}
        parts[2:2] = [f"{name}{size}" for name, size in sizes.items() if size > 1]
        parts += [f"v{self.model_chunks}{self.placement.value}"] * (self.model_chunks > 1)
        parts += [
            getattr(self.schedule, "__name__", self.schedule),
            "tied" if self.tied else "untied",
            f"zero{self.zero}",
            self.dtype,
        ]
        parts += ["recompute"] * bool(self.recompute) + ["stages"] * self.recompute_stages
        parts += ["stateful"] * self.stateful
        return "-".join([*parts, self.accumulate or ""]).rstrip("-")


class RecordingSGD(torch.optim.SGD):
    """Keeps the gradients that a step is about to use."""

    def step(self, closure: Any = None) -> None:
        self.seen = {
            parameter: parameter.grad.clone()
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        }
        super().step(closure)


def hidden_spec(rows: int, tokens: int, dtype: torch.dtype) -> tuple[TensorSpec, ...]:
    """Tensors between the stages of the small transformer."""
    return (TensorSpec((rows, tokens, models.HIDDEN), dtype, True),)


def build(
    setup: Setup,
    *,
    layers: list[Any] | None = None,
    loss_fn: Callable[..., Any] | None = models.loss_fn,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    config: dict[str, Any] | None = None,
    engine_keywords: dict[str, Any] | None = None,
    prepare: Callable[[TokenSlicePipelineModule], Any] = lambda model: None,
    **module_keywords: Any,
) -> TokenSlicePipelineEngine:
    """The engine of a setup, by default with SGD and a learning rate of 1. `prepare` gets the module first."""
    torch.manual_seed(0)
    module_keywords.setdefault("activation_spec", hidden_spec)
    module_keywords.setdefault("activation_checkpoint_interval", setup.recompute)
    module_keywords.setdefault("recompute_stages", setup.recompute_stages)
    model = TokenSlicePipelineModule(
        models.layers(setup.num_blocks, tied=setup.tied, stateful=setup.stateful) if layers is None else layers,
        layout=setup.layout,
        token_slices=TokenSlices(setup.cut),
        loss_fn=loss_fn,
        num_model_chunks=setup.model_chunks,
        placement=setup.placement,
        **module_keywords,
    )
    prepare(model)
    if optimizer is None:
        optimizer = lambda parameters: RecordingSGD(parameters, lr=LONG_STEP if by_step(setup) else 1.0)  # noqa: E731
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": setup.micro_batches,
        "zero_optimization": {"stage": setup.zero, "reduce_bucket_size": 10**5, "allgather_bucket_size": 10**5},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,  # DeepSpeed clips to a norm of 1 by default
    }
    if setup.dtype in ("bf16", "fp16"):
        settings[setup.dtype] = {"enabled": True}
    if setup.accumulate:
        settings["data_types"] = {"grad_accum_dtype": setup.accumulate}
    engine, *_ = initialize(
        model,
        settings | dict(setup.config) | (config or {}),
        schedule=setup.schedule,
        **(engine_keywords or {}),
        optimizer=optimizer([parameter for parameter in model.parameters() if parameter.requires_grad]),
    )
    if setup.dtype == "fp64":
        # DeepSpeed refuses fp64 weights when it makes an engine, and to reduce them, but computes with them.
        accelerator = get_accelerator()
        accelerator.supported_dtypes = lambda: [torch.float64, torch.float32, torch.bfloat16, torch.float16]
        engine.communication_data_type = torch.float64
        engine.module.double()
    return engine


def by_step(setup: Setup) -> bool:
    """Whether gradients must be read from a step: these optimizers keep them in flat pieces of their own."""
    return setup.zero > 0 or setup.dtype in ("bf16", "fp16")


def batches_of(setup: Setup, data_rank: int, *, step: int = 0, rows: int = ROWS, seq: int | None = None) -> list[Any]:
    """A data-parallel rank's micro-batches of one step."""
    return models.batches(setup.micro_batches, rows, 100 * step + data_rank, seq or sum(setup.cut))


def feed(engine: TokenSlicePipelineEngine, setup: Setup, *, step: int = 0, rows: int = ROWS) -> Any:
    return iter(batches_of(setup, engine.replica, step=step, rows=rows))


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A copy that survives its process; numpy has no bf16."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).numpy().copy()


def weights(engine: TokenSlicePipelineEngine) -> dict[str, np.ndarray]:
    return {name: as_numpy(parameter) for name, parameter in engine.module.named_parameters()}


def gradients(setup: Setup) -> tuple[float, dict[str, np.ndarray]]:
    """Train one step: the loss, and the gradient of each of this rank's parameters that has one."""
    engine = build(setup)
    before = weights(engine)
    loss = engine.train_batch(feed(engine, setup)).item()
    if not by_step(setup):
        seen = engine.optimizer.seen
        return loss, {name: as_numpy(seen[p]) for name, p in engine.module.named_parameters() if p in seen}
    after = weights(engine)
    return loss, {name: (before[name].astype(np.float64) - after[name]) / LONG_STEP for name in before}


def losses(engine: TokenSlicePipelineEngine, setup: Setup, steps: int, *, first: int = 0) -> list[float]:
    """Train on the setup's batches."""
    return [engine.train_batch(feed(engine, setup, step=first + step)).item() for step in range(steps)]
