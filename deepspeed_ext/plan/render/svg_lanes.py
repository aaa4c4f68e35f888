"""The lanes below the tracks of SVG pictures: what goes to the host and back, and gradients summed over replicas.

stage 0 | [F0.0][F0.1]        [B0.1][B0.0]
to host |       [===]
back    |               [===]
links   |                           [====]
"""

from collections.abc import Iterator
from xml.sax.saxutils import escape

from deepspeed_ext.plan.render.copies import copies_of
from deepspeed_ext.plan.render.labels import with_unit
from deepspeed_ext.plan.render.svg_axis import Scale
from deepspeed_ext.plan.render.svg_elements import FETCH, OFFLOAD, REDUCTION, rect
from deepspeed_ext.plan.timeline import Timeline

_LANE = 7
"""Height of a lane."""
COPY_FILLS = (OFFLOAD, FETCH)
"""Of copies to the host, and back."""


def lanes_height(timeline: Timeline) -> float:
    """Height of the lanes below each track: two where anything is copied, one where anything is reduced."""
    return _LANE * (2 * bool(timeline.host_copies) + bool(timeline.reductions))


def lanes(timeline: Timeline, rank: int, scale: Scale, top: float) -> Iterator[str]:
    """Return the bars in the lanes of a rank.

    Args:
        top: y of the first lane.
    """

    def drawn(start: float, end: float, y: float, fill: str, what: str) -> str:
        x, right = scale.x(start - timeline.start), scale.x(end - timeline.start)
        tooltip = f"{what}: {start - timeline.start:.6g} to {with_unit(end - timeline.start, timeline.unit)}"
        mark = bar(x + min(0.75, (right - x) * 0.08), y, max(right - x - 1.5, (right - x) * 0.84), fill)
        return f"<g><title>{escape(tooltip)}</title>{mark}</g>"

    if timeline.host_copies:
        for lane, copies in enumerate(copies_of(timeline, rank)):
            for copy in copies:
                yield drawn(copy.start, copy.end, top, COPY_FILLS[lane], copy.words(lane))
            top += _LANE
    for stage, piece, start, end in timeline.reductions:
        if timeline.shape.rank_of(stage) == rank:
            yield drawn(start, end, top, REDUCTION, f"reduction {piece} of stage {stage}")


def bar(x: float, y: float, width: float, fill: str) -> str:
    """Return a mark of a lane."""
    return rect(x, y, width, _LANE - 2, f'rx="1.5" {fill}')
