"""The drawings that options ask for."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from deepspeed_ext.plan.command.sizes import Memory
from deepspeed_ext.plan.render import Panel, render_chrome_trace, render_comparison, render_html, render_svg
from deepspeed_ext.plan.text.text_files import write_text
from deepspeed_ext.plan.timeline import Timeline


def write_drawings(
    options: argparse.Namespace, panels: Sequence[tuple[str, Timeline]], memory: Memory, title: str
) -> None:
    """Write each drawing that has a file.

    Args:
        panels: name and timeline of each, the first being the one that a trace holds.
    """
    svg: Path | None = options.svg
    timeline = panels[0][1]
    if svg is not None:
        write_text(svg, render_svg(timeline, title) if len(panels) == 1 else render_comparison(panels))
    if options.trace is not None:
        write_text(options.trace, render_chrome_trace(timeline, memory.curves(timeline), memory.host_curves(timeline)))
    if options.html is not None:
        pages = [Panel(name, each, memory.curves(each), memory.unit, memory.host_curves(each)) for name, each in panels]
        write_text(options.html, render_html(pages, title))
