"""Schedules as `--pipeline-schedule` names them."""

from pathlib import Path

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.schedules import OPTIMISED, SCHEDULES
from megatron_terapipe.config.fields.options import one_of
from megatron_terapipe.errors import ConfigError


def check_schedule(name: str, shape: PipelineShape, memory_limit: float | None) -> None:
    """See that a name is that of a schedule, or of a file, and that the schedule is for a pipeline.

    Args:
        memory_limit: value of `--schedule-memory-limit`; None = it is not given.

    Raises:
        ConfigError: if it is not.
    """
    if memory_limit is not None and memory_limit < 1:
        raise ConfigError(
            f"--schedule-memory-limit {memory_limit} is less than one micro-batch, which has to go forward before it "
            "can go backward: give 1 or more"
        )
    if memory_limit is not None and name != OPTIMISED:
        raise ConfigError(
            f"--schedule-memory-limit {memory_limit} goes with --pipeline-schedule {OPTIMISED}, not with {name}: "
            "drop it"
        )
    if name in SCHEDULES:
        try:
            # A schedule says itself which pipelines it is for.
            next(SCHEDULES[name](shape, 0), None)
        except PlanError as error:
            raise ConfigError(f"--pipeline-schedule {name}: {error}") from None
    elif name != OPTIMISED and not Path(name).is_file():
        raise ConfigError(
            f"--pipeline-schedule {name} is neither a schedule nor a file of one: choose "
            f"{one_of([*SCHEDULES, OPTIMISED])}, or name a file"
        )
