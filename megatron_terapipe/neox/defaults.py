"""NeoX's defaults that have changed, by the time of the files."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Defaults:
    """Values of settings that a file leaves out."""

    dropout: float
    weight_decay: float


SINCE_2023_12 = Defaults(dropout=0.0, weight_decay=0.1)
"""Defaults of NeoX since December 2023."""

BEFORE_2023_12 = Defaults(dropout=0.1, weight_decay=0.01)
"""Defaults of NeoX until then, version 2.0 included."""
