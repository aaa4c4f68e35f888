"""Makes an engine: the one place that gates DeepSpeed's version and names our engine class to DeepSpeed."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.ops
from packaging.specifiers import SpecifierSet

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.schedules import Schedule, schedule_named
from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine
from deepspeed_ext.runtime.module import TokenSlicePipelineModule

SUPPORTED_DEEPSPEED = SpecifierSet(">=0.19.8,<0.20")
"""0.19.8 brought the schedule hooks this engine overrides; before 0.19.3 gradients of pipelines were wrong."""


def initialize(
    model: TokenSlicePipelineModule,
    config: dict[str, Any] | str,
    *,
    schedule: str | Schedule = "1f1b",
    timeout: timedelta = timedelta(minutes=30),
    ledger_directory: str | Path = "stalled_pipeline",
    overlap_grad_reduce: bool = True,
    overlap_param_gather: bool = False,
    **keywords: Any,
) -> tuple[TokenSlicePipelineEngine, Any, Any, Any]:
    """Make the engine of a model, as `deepspeed.initialize` does.

    Args:
        model: the module of this rank.
        config: DeepSpeed configuration, or the file of one.
        schedule: order of the ops: a name of `plan.schedules.SCHEDULES`, or a generator of your own.
        timeout: longest time that a transfer between stages may take before it counts as lost.
        ledger_directory: directory to which every rank writes its progress and what it waits for, if the pipeline
            stands still for most of that time.
        overlap_grad_reduce: start to sum gradients over data-parallel ranks as soon as the last backward of the step
            has passed a layer; else after the last op. Settings of `config` that only DeepSpeed's own reductions
            know, such as ZeRO's `contiguous_gradients` and `overlap_comm`, turn it off.
        overlap_param_gather: under ZeRO 1 and in bf16, gather the weights that other ranks stepped while the next
            forward runs. Code that reads weights itself between two batches must call `engine.complete_weights()`.
        **keywords: others of `deepspeed.initialize`, such as `optimizer`, `model_parameters` or `lr_scheduler`.

    Returns:
        `(engine, optimizer, dataloader, lr_scheduler)`, as `deepspeed.initialize`.

    Raises:
        UserError: if DeepSpeed has another version, the configuration asks for what pipelines cannot do, or ranks
            registered modules to share that do not fit.
    """
    check_deepspeed_version()
    if isinstance(schedule, str):
        schedule = schedule_named(schedule)
    # Before optimizers copy weights and ask which of them to count.
    model.connect_shared_modules()
    engine_class = partial(
        TokenSlicePipelineEngine,
        schedule=schedule,
        timeout=timeout,
        ledger_directory=Path(ledger_directory),
        overlap_grad_reduce=overlap_grad_reduce,
        overlap_param_gather=overlap_param_gather,
    )
    with _engine_class(engine_class):
        engine, *others = deepspeed.initialize(model=model, config=config, **keywords)
    _check_precision(engine)
    return engine, *others


def _check_precision(engine: TokenSlicePipelineEngine) -> None:
    """Refuse what DeepSpeed's settings can ask for and its pipelines would do wrongly."""
    if engine.fp16_enabled() and not engine.zero_optimization():
        raise UserError(
            "fp16 with ZeRO stage 0: DeepSpeed divides a pipeline's gradients by a loss scale it never applied; "
            "use ZeRO stage 1, or bf16"
        )
    if engine.torch_autocast_enabled():
        raise UserError(
            "torch_autocast is set, under which layers compute in one dtype and keep keys, values and gradients in "
            "another: use the bf16 or fp16 section instead"
        )


def init_distributed(**keywords: Any) -> None:
    """Join the process group as `deepspeed.init_distributed` does, without compiling an op.

    On CPUs DeepSpeed would first build its shared-memory collectives with a C++ compiler; gloo does without.
    """
    check_deepspeed_version()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(**keywords)


def check_deepspeed_version() -> None:
    """Refuse the versions of DeepSpeed that this engine was not written against.

    Raises:
        UserError: if another version is installed.
    """
    installed = version("deepspeed")
    if installed not in SUPPORTED_DEEPSPEED:
        raise UserError(
            f"deepspeed {installed} is installed, and the token-slice engine needs {SUPPORTED_DEEPSPEED}: "
            f"pip install 'deepspeed{SUPPORTED_DEEPSPEED}'"
        )


@contextmanager
def _engine_class(engine_class: Any) -> Iterator[None]:
    """Let `deepspeed.initialize` make an engine of another class: it looks the class up in its own module."""
    original = deepspeed.PipelineEngine
    deepspeed.PipelineEngine = engine_class
    try:
        yield
    finally:
        deepspeed.PipelineEngine = original
