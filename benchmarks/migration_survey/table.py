"""The table of a survey: how many of each set passed, and what stops the rest."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.migration_survey.attempts import Outcome


def table(outcomes: Sequence[Outcome], *, shows_lines: bool) -> Iterator[str]:
    """Yield the lines of the table.

    Args:
        shows_lines: whether the line of every refusal is shown, too.
    """
    yield "| set | passed | refused | defects | of |"
    yield "|---|---|---|---|---|"
    for origin, of_set in _by_origin(outcomes).items():
        passed, defects = sum(each.passed for each in of_set), sum(each.is_defect for each in of_set)
        yield f"| {origin} | {passed} | {len(of_set) - passed - defects} | {defects} | {len(of_set)} |"
    for origin, of_set in _by_origin(outcomes).items():
        counts = _features(of_set)
        if not counts:
            continue
        yield from ["", f"{origin}: what stops them", "", "| feature | stops | alone |", "|---|---|---|"]
        alone = Counter(next(iter(set(each.features()))) for each in of_set if len(set(each.features())) == 1)
        for feature, number in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
            yield f"| {feature} | {number} | {alone[feature]} |"
    if shows_lines:
        for each in outcomes:
            if not each.passed:
                yield f"{each.attempt.origin}: {each.attempt.name}: {each.line}"


def as_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the same as numbers and words."""
    return {
        origin: {
            "attempts": len(of_set),
            "passed": sum(each.passed for each in of_set),
            "defects": sum(each.is_defect for each in of_set),
            "features": dict(_features(of_set).most_common()),
            "lines": {each.attempt.name: each.line for each in of_set if not each.passed},
        }
        for origin, of_set in _by_origin(outcomes).items()
    }


def _by_origin(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    sets: dict[str, list[Outcome]] = {}
    for each in outcomes:
        sets.setdefault(each.attempt.origin, []).append(each)
    return sets


def _features(outcomes: Sequence[Outcome]) -> Counter[str]:
    return Counter(feature for each in outcomes for feature in set(each.features()))
