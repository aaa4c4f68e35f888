"""Draws a timeline, predicted or measured: as a text grid, as SVG, as an HTML page, or as a trace for a viewer."""

from deepspeed_ext.plan.draw.chrome_trace import render_chrome_trace
from deepspeed_ext.plan.draw.html import Panel, render_html
from deepspeed_ext.plan.draw.svg import render_comparison, render_svg
from deepspeed_ext.plan.draw.text import render_text

__all__ = ["Panel", "render_chrome_trace", "render_comparison", "render_html", "render_svg", "render_text"]
