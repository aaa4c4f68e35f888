"""JSON that users write, parsed into values that the rest of the program can hold.

Python's parser takes more than JSON: it reads NaN, it keeps the last of two equal keys, and it makes whole numbers and
half characters that no file and no array can hold. None of this reaches a reader of files.
"""

import json
from collections import Counter
from math import isfinite, isinf

from deepspeed_ext.plan.errors import PlanError

MOST_LEVELS = 64
"""Levels of nesting at most: readers call themselves for each."""

WHOLE_NUMBERS = 2**63
"""Whole numbers are below this, and above its negative, as in arrays."""

_LEAST_VALUES = 100_000
"""Values that any text may stand for. More, and it cannot stand for more of them than it has characters."""


def parse_json(text: str, described: str, *, infinite: bool = False, unbounded: bool = False) -> object:
    """Parse JSON text.

    Args:
        infinite: whether numbers may be infinite, as Python writes and reads them.
        unbounded: whether whole numbers may have any size, as Hugging Face writes 10^30 where there is no limit.

    Raises:
        PlanError: if it is not JSON, has a key twice, or holds what `check_values` refuses.
    """
    try:
        document = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{described} is not JSON ({error}): mend it") from None
    check_values(document, described, len(text), infinite=infinite, unbounded=unbounded)
    return document


def check_values(
    document: object, described: str, num_characters: int, *, infinite: bool = False, unbounded: bool = False
) -> None:
    """Check that a document holds finite numbers and text that can be written, and is not nested too deeply.

    Args:
        num_characters: characters of the text. Where it refers to its own parts, as YAML may, it can stand for much
            more than it holds.
        infinite: whether numbers may be infinite.
        unbounded: whether whole numbers may have any size.

    Raises:
        PlanError: if it does not, or is.
    """
    level, counted = [document], 0
    for _ in range(MOST_LEVELS):
        below: list[object] = []
        for value in level:
            if isinstance(value, dict):
                below += value
                below += value.values()
            elif isinstance(value, list | tuple | set):
                below += value
            elif fault := _fault(value, infinite, unbounded):
                raise PlanError(f"{described} {fault}")
            counted += 1
            if counted > max(num_characters, _LEAST_VALUES):
                raise PlanError(f"{described} refers to its own parts again and again: write out what it stands for")
        if not below:
            return
        level = below
    raise PlanError(f"{described} is nested more than {MOST_LEVELS} levels deep: make it flatter")


def _fault(value: object, infinite: bool, unbounded: bool) -> str | None:
    """Return what is wrong with a number or a text, and the remedy; None if nothing is."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return f"holds {value}, which is half a character: write the text anew"
    elif isinstance(value, float) and not isfinite(value) and not (infinite and isinf(value)):
        return f"holds the number {value}, or one too large to tell it from that: give a finite number"
    elif isinstance(value, int) and not unbounded and not -WHOLE_NUMBERS < value < WHOLE_NUMBERS:
        return f"holds a whole number of {len(str(abs(value)))} digits: give one below 2^63, or write it as 1e30"
    return None


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    document = dict(pairs)
    if len(document) < len(pairs):
        repeated, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"key {repeated!r} stands twice")
    return document
