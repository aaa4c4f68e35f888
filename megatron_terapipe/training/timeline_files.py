"""The timeline of an iteration, in the forms that people and programs read."""

from pathlib import Path

from deepspeed_ext.plan.render.chrome_trace import render_chrome_trace
from deepspeed_ext.plan.render.svg import render_svg
from deepspeed_ext.plan.timeline import Timeline
from megatron_terapipe.config import ParallelConfig


def write_timeline(timeline: Timeline, directory: Path, parallel: ParallelConfig) -> str:
    """Write a timeline as JSON, as a picture and as a Chrome trace. Returns the line for the log."""
    directory.mkdir(parents=True, exist_ok=True)
    title = f"{parallel.pipeline_schedule}, {parallel.num_token_slices} token slices, as executed"
    (directory / "timeline.json").write_text(timeline.to_json())
    (directory / "timeline.svg").write_text(render_svg(timeline, title))
    (directory / "timeline.trace.json").write_text(render_chrome_trace(timeline))
    return f" wrote {directory}/timeline.svg, .json and .trace.json: bubble {timeline.bubble_ratio:.1%}"
