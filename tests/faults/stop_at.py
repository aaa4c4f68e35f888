"""Stops this process as SIGSTOP does, at a place of the trainer: imported by a `sitecustomize` where STOP_AT is set."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

STOPPED = "stopped"
"""File that appears when the process has stopped."""

PLACES = ("meeting", "joining", "building", "op", "end of step", "evaluating", "saving", "end of save", "leaving")
"""Where a rank may stop: before the ranks have met, before they are watched together, while the engine is built, and in
the third iteration or after it."""

RUN_AT_START = """
import os
if os.environ.get("RANK") == os.environ.get("STOP_RANK"):
    from tests.faults import stop_at
    stop_at.prepare(os.environ["STOP_AT"])
"""
"""Text of the `sitecustomize`."""


def prepare(place: str) -> None:
    """Let this process stop as soon as it is at a place."""
    import torch.distributed

    from deepspeed_ext.plan.programs.program import InstructionKind
    from deepspeed_ext.runtime.engine import TokenSlicePipelineEngine as Engine
    from deepspeed_ext.runtime.executor import Executor
    from megatron_terapipe.checkpoint.save import UnfinishedSave
    from megatron_terapipe.training import build_engine

    first_slices: list[Any] = []

    def in_a_third_backward(_: object, instruction: Any) -> bool:
        op = instruction.op
        if instruction.kind is InstructionKind.BACKWARD and op.micro_batch == op.token_slice == 0:
            first_slices.append(op)
        return len(first_slices) == 3

    def in_the_third(engine: Any) -> bool:
        return engine.global_steps == 2

    def when_saved_before(engine: Any, *_: object, **__: object) -> bool:
        return engine.global_steps == 4

    saves: list[Any] = []

    def after_one(save: Any, *_: object, **__: object) -> bool:
        saves.append(save)
        return len(saves) == 2

    owner, name, when = {
        "meeting": (build_engine, "init_distributed", _always),
        "joining": (build_engine, "watch_this_rank", _always),
        "building": (build_engine, "initialize", _always),
        "op": (Executor, "execute", in_a_third_backward),
        "end of step": (Engine, "_aggregate_total_loss", in_the_third),
        "evaluating": (Engine, "eval_batch", _always),
        "leaving": (torch.distributed, "destroy_process_group", _always),
        "saving": (Engine, "save_checkpoint", when_saved_before),
        "end of save": (UnfinishedSave, "finish", after_one),
    }[place]
    _stop_before(owner, name, when)


def _always(*_: object, **__: object) -> bool:
    return True


def _stop_before(owner: Any, name: str, when: Callable[..., bool]) -> None:
    original = getattr(owner, name)

    @wraps(original)
    def stopping(*given: Any, **named: Any) -> Any:
        if when(*given, **named):
            Path(STOPPED).write_text(str(os.getpid()))
            with suppress(OSError):
                os.kill(os.getpid(), signal.SIGSTOP)
        return original(*given, **named)

    setattr(owner, name, stopping)
