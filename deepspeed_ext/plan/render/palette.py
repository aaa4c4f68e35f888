"""Colours of ops: a hue for each micro-batch, a lightness for each token slice.

Colours are chosen in OKLCH, where equal steps look equal, so no micro-batch outshines another and token slices
darken evenly from first to last.
"""

from math import cos, radians, sin

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
    """Convert OKLCH to sRGB, clipped to what a screen can show.

    Args:
        lightness: from 0 to 1.
        chroma: from 0.
    """
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
