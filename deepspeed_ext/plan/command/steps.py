"""The measured steps that `--timeline` names: one file, or all those of a directory."""

from pathlib import Path

from deepspeed_ext.plan.errors import PlanError, UserError
from deepspeed_ext.plan.measured.step_record import StepRecord
from deepspeed_ext.plan.text.text_files import read_text
from deepspeed_ext.plan.timeline import executed_order

STEP_FILES = "iteration_*.json"
"""Name of the files of measured steps that the trainer writes."""


def read_steps(path: Path) -> list[StepRecord]:
    """Read the step of a file, or the steps of a directory in the order of their iterations.

    Raises:
        UserError: if nothing is there, or something else.
    """
    files = [path]
    if path.is_dir():
        files = sorted(path.glob(STEP_FILES))
        if not files:
            raise UserError(f"{path} has no {STEP_FILES}, which the trainer writes with --timeline: name another")
    steps = []
    for file in files:
        try:
            steps.append(StepRecord.from_json(read_text(file)))
        except PlanError as error:
            raise PlanError(f"{file}: {error}") from None
    return steps


def alike(steps: list[StepRecord]) -> list[StepRecord]:
    """The steps that ran what the last one ran: a run may ramp its batches up, or go on with another schedule."""
    order, last = executed_order(steps[-1].timeline), steps[-1]
    return [
        step
        for step in steps
        if (step.timeline.shape, step.timeline.unit, step.token_slices)
        == (last.timeline.shape, last.timeline.unit, last.token_slices)
        and executed_order(step.timeline) == order
    ]


def name_of(path: Path, steps: list[StepRecord]) -> str:
    """Return the name that drawings give the steps."""
    iterations = [step.iteration for step in steps if step.iteration is not None]
    if not iterations:
        return path.stem
    several = len(iterations) > 1
    numbers = f"iterations {iterations[0]} to {iterations[-1]}" if several else f"iteration {iterations[0]}"
    return f"{steps[0].schedule or path.stem}, {numbers}"
