"""Measured iterations, in the forms that people and programs read."""

from pathlib import Path

from deepspeed_ext.plan.measured import Comparison
from deepspeed_ext.plan.measured.step_record import StepRecord
from deepspeed_ext.plan.memory import activation_over_time
from deepspeed_ext.plan.render import Panel, render_chrome_trace, render_html, render_svg


def write_step(step: StepRecord, directory: Path) -> None:
    """Write a measured iteration as JSON, for `python -m deepspeed_ext.plan --timeline`.

    Args:
        step: the iteration.
        directory: directory to write to.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"iteration_{step.iteration:06d}.json").write_text(step.to_json())


def write_drawings(step: StepRecord, directory: Path) -> str:
    """Draw a measured iteration: a picture, a Chrome trace, and a page with its simulation below it.

    Args:
        step: the iteration.
        directory: directory to write to.

    Returns:
        The line for the log.
    """
    timeline = step.timeline
    title = f"{step.schedule}, iteration {step.iteration}, as executed"
    comparison = Comparison((timeline,))
    panels = [
        Panel(name, each, activation_over_time(each, step.token_slices))
        for name, each in ((title, timeline), ("simulated with the measured op times", comparison.simulated))
    ]
    (directory / "timeline.json").write_text(step.to_json())
    (directory / "timeline.svg").write_text(render_svg(timeline, title))
    (directory / "timeline.html").write_text(render_html(panels, title))
    (directory / "timeline.trace.json").write_text(render_chrome_trace(timeline))
    return (
        f" wrote {directory}/timeline.svg, .html, .json and .trace.json: bubble {timeline.bubble_ratio:.1%}, simulated "
        f"time {comparison.efficiency:.1%} of the measured"
    )
