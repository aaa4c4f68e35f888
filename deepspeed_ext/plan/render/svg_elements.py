"""The vocabulary of our SVG pictures: shapes, texts, colours for light and dark pages, and the document around them.

Colours are given as attributes, for any viewer, and a style sheet changes them where the reader prefers dark. The
picture brings its own background, so that it is legible on any page.
"""

from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

MARGIN = 28

INK, SOFT = 'class="ink" fill="#1f2328"', 'class="soft" fill="#636c76"'
TRACK, GRID = 'class="track" fill="#eef0f3"', 'class="grid" stroke="#d8dde3"'
REDUCTION = 'fill="#8250df" fill-opacity="0.75"'
OFFLOAD, FETCH = 'fill="#bc4c00" fill-opacity="0.75"', 'fill="#1b7c83" fill-opacity="0.75"'
LABEL = 'fill="#1f2328"'  # on an op, which keeps its colour in the dark
MIDDLE = 'dominant-baseline="central"'
CENTRED = f'text-anchor="middle" {MIDDLE}'
HATCHED, HATCHED_BACK, DOTTED = 'fill="url(#hatch)"', 'fill="url(#hatch-back)"', 'fill="url(#dots)"'

_STYLE = """<style>
text { font-family: Inter, "Segoe UI", Helvetica, Arial, "DejaVu Sans", sans-serif; }
@media (prefers-color-scheme: dark) {
.card { fill: #0d1117; stroke: #30363d; } .ink { fill: #e6edf3; } .soft { fill: #9198a1; }
.track { fill: #1c222b; } .grid { stroke: #30363d; }
}
</style>"""
_PATTERNS = (
    '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse">'
    '<path d="M-1.5,1.5 l3,-3 M0,6 l6,-6 M4.5,7.5 l3,-3" stroke="#1f2328" stroke-opacity="0.28" stroke-width="1.5"/>'
    '</pattern><pattern id="hatch-back" width="6" height="6" patternUnits="userSpaceOnUse">'
    '<path d="M-1.5,4.5 l3,3 M0,0 l6,6 M4.5,-1.5 l3,3" stroke="#1f2328" stroke-opacity="0.28" stroke-width="1.5"/>'
    '</pattern><pattern id="dots" width="5" height="5" patternUnits="userSpaceOnUse">'
    '<circle cx="1.25" cy="1.25" r="0.8" fill="#1f2328" fill-opacity="0.42"/>'
    '<circle cx="3.75" cy="3.75" r="0.8" fill="#1f2328" fill-opacity="0.42"/></pattern></defs>'
)


def document(body: Sequence[str], width: float, height: float, title: str, description: str) -> str:
    """Return an SVG document on a card of its own."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img" aria-label={quoteattr(description)}>'
    )
    card = (
        f'<rect class="card" x="0.5" y="0.5" width="{width - 1:g}" height="{height - 1:g}" rx="10" '
        'fill="#ffffff" stroke="#d8dde3"/>'
    )
    return "\n".join([head, f"<title>{escape(title)}</title>", _STYLE, _PATTERNS, card, *body, "</svg>", ""])


def rect(x: float, y: float, width: float, height: float, attributes: str) -> str:
    """Return a rectangle."""
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" {attributes}/>'


def text(x: float, y: float, content: str, attributes: str) -> str:
    """Return a text."""
    return f'<text x="{x:.2f}" y="{y:.2f}" {attributes}>{escape(content)}</text>'


def text_width(content: str) -> float:
    """Width of a text, in its font size; digits and capitals are about alike in the fonts we name."""
    return sum(0.32 if character in ".,· " else 0.62 for character in content)
