"""Elements that drawings share: names of rows, colours, lanes of host copies, and elements of SVG.

A micro-batch has a hue, a token slice a lightness, both in OKLCH, where equal steps look equal. Colours are given as
attributes, for any viewer, and a style sheet changes them where the reader prefers dark.
"""

from collections.abc import Sequence
from math import cos, radians, sin
from typing import NamedTuple
from xml.sax.saxutils import escape, quoteattr

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import OpKind, PipelineShape
from deepspeed_ext.plan.programs.host_copies import TimedCopy
from deepspeed_ext.plan.programs.program import Content
from deepspeed_ext.plan.timeline import Timeline


def rank_name(shape: PipelineShape, rank: int) -> str:
    """Return the name of a row."""
    return f"rank {rank}" if shape.num_model_chunks > 1 else f"stage {rank}"


KIND_NAMES = {
    OpKind.FORWARD: "forward",
    OpKind.BACKWARD: "backward",
    OpKind.INPUT_GRADIENT: "input gradient",
    OpKind.WEIGHT_GRADIENT: "weight gradient",
}
"""Kinds of ops in words."""


def with_unit(time: float, unit: str, *, digits: int = 4) -> str:
    """Return a time as it is shown."""
    return f"{time:.{digits}g}{unit and ' ' + unit}"


def common_unit(timelines: Sequence[Timeline]) -> str:
    """Return the unit of timelines that are drawn on one axis."""
    units = {timeline.unit for timeline in timelines}
    if len(units) != 1:
        raise PlanError(
            f"{len(timelines)} timelines in {len(units)} units on one axis: give at least one, all in one unit"
        )
    return units.pop()


_FIRST_HUE = 255.0  # blue
_GOLDEN_ANGLE = 137.508  # neighbours in micro-batch order are far apart in hue, however many there are
_CHROMA = 0.105
_LIGHTEST, _DARKEST, _ALONE = 0.90, 0.66, 0.77  # all light enough for dark labels


def op_colour(micro_batch: int, token_slice: int, num_token_slices: int) -> str:
    """Return the fill of an op, as `#rrggbb`."""
    lightness = _ALONE
    if num_token_slices > 1:
        lightness = _LIGHTEST - (_LIGHTEST - _DARKEST) * token_slice / (num_token_slices - 1)
    # Light colours hold less chroma: without this, the first token slices would look washed in neon.
    chroma = _CHROMA * min(1.0, (1 - lightness) / (1 - _ALONE) * 0.75 + 0.25)
    return oklch_to_hex(lightness, chroma, (_FIRST_HUE + _GOLDEN_ANGLE * micro_batch) % 360)


def oklch_to_hex(lightness: float, chroma: float, hue: float) -> str:
    """Convert OKLCH to sRGB, clipped to the gamut of a screen."""
    a, b = chroma * cos(radians(hue)), chroma * sin(radians(hue))
    # The matrices of Ottosson's Oklab: to cone responses, then to linear sRGB.
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
    return "#" + "".join(f"{round(255 * _encoded(value)):02x}" for value in linear)


def _encoded(linear: float) -> float:
    """The sRGB transfer curve."""
    value = min(max(linear, 0.0), 1.0)
    return 12.92 * value if value <= 0.0031308 else 1.055 * value ** (1 / 2.4) - 0.055


LANES = ("to host", "from host")
"""Names of the lanes."""

_LETTERS = {Content.INPUT: "I", Content.KEYS_AND_VALUES: "K"}


class DrawnCopy(NamedTuple):
    """A copy in one direction."""

    copy: TimedCopy
    start: float
    end: float

    def label(self, shape: PipelineShape) -> str:
        """Name of it within its row: `K0.1` are keys and values, `I0.1` is a stage input, `2K0.1` is on stage 2."""
        stage = f"{self.copy.stage}" if shape.num_model_chunks > 1 else ""
        return f"{stage}{self.letter}{self.copy.micro_batch}.{self.copy.token_slice}"

    @property
    def letter(self) -> str:
        """Letter of the content."""
        return _LETTERS[self.copy.content]

    def words(self, lane: int) -> str:
        """Content and direction of the copy, in words."""
        _, stage, micro_batch, token_slice, *_ = self.copy
        content = (
            f"{self.copy.content.value} of token slice {token_slice} of micro-batch {micro_batch} on stage {stage}"
        )
        return f"{content} {LANES[lane]}"


def copies_of(timeline: Timeline, rank: int) -> Sequence[list[DrawnCopy]]:
    """Return the copies of a rank to the host, and those back, each by start; nothing where no rank has copies."""
    if not timeline.host_copies:
        return ()
    own = [copy for copy in timeline.host_copies if timeline.shape.rank_of(copy.stage) == rank]
    there = [DrawnCopy(copy, copy.offload_start, copy.offload_end) for copy in own]
    back = [DrawnCopy(copy, copy.fetch_start, copy.fetch_end) for copy in own]
    return sorted(there, key=lambda drawn: drawn.start), sorted(back, key=lambda drawn: drawn.start)


MARGIN = 28

INK, SOFT = 'class="ink" fill="#1f2328"', 'class="soft" fill="#636c76"'
TRACK, GRID = 'class="track" fill="#eef0f3"', 'class="grid" stroke="#d8dde3"'
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
