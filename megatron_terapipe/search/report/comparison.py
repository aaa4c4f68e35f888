"""Comparison of the winner with another strategy: what differs, and what that changes in the time of an iteration."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from megatron_terapipe.dimensions import Dimension, in_places
from megatron_terapipe.search.cost.prediction import Prediction, TimeBreakdown
from megatron_terapipe.search.rank.ranked import Ranked
from megatron_terapipe.search.report.figures import bytes_text, numbers_text, time_text
from megatron_terapipe.strategy import DIMENSIONS

TIME_NAMES = {
    "compute_s": "compute",
    "tensor_parallel_s": "tensor-parallel collectives",
    "head_exchange_s": "head exchanges",
    "host_copy_s": "copies from hosts that come late",
    "bubble_s": "bubbles",
    "transfer_s": "transfers between stages",
    "gradient_reduction_s": "gradient reduction",
    "shared_weight_s": "tied embedding",
    "optimizer_s": "optimizer",
    "fixed_s": "fixed",
}
"""Parts of an iteration in words."""

_WORTH_SAYING = 0.005
"""Parts that differ by less than this share of the iteration are noise to a reader."""

_LEAST_SHARE = 0.001
"""Shares below this would be written as none."""


@dataclass(frozen=True, slots=True)
class StrategyComparison:
    """The differences between the winner and another strategy."""

    changes: tuple[tuple[str, str, str], ...]
    """What the other does differently: name, the winner's value, the other's."""
    saved_s: tuple[tuple[str, float], ...]
    """Seconds that the winner is shorter by, for each part of the iteration that matters, largest first."""
    sentences: tuple[str, ...]
    """The same in words."""


def rivals(priced: Sequence[Ranked]) -> list[Ranked]:
    """Return the runner-up; and, if it is much like the winner, the best with other parallel sizes or schedule.

    Args:
        priced: strategies that can run, best first.
    """
    if len(priced) < 2:
        return []
    winner, runner_up = priced[:2]
    other = next((entry for entry in priced[1:] if _layout(entry) != _layout(winner)), None)
    return [runner_up] if other is None or other is runner_up else [runner_up, other]


def _layout(entry: Ranked) -> list[object]:
    """Return the parallel sizes and the schedule."""
    strategy = entry.strategy
    return [*(getattr(strategy, each.name) for each in DIMENSIONS if each.ranks), strategy.schedule]


def compare(winner: Ranked, other: Ranked) -> StrategyComparison:
    """Compare the winner with another strategy."""
    assert winner.prediction is not None and other.prediction is not None
    first, second = winner.prediction, other.prediction
    changes = tuple(
        (words, _value(winner, each), _value(other, each))
        for each, words in in_places(DIMENSIONS, "label")
        if getattr(winner.strategy, each.name) != getattr(other.strategy, each.name)
    )
    saved = sorted(
        (
            (name, getattr(second.breakdown, name) - getattr(first.breakdown, name))
            for name in (each.name for each in fields(TimeBreakdown))
        ),
        key=lambda part: -abs(part[1]),
    )
    worth = _WORTH_SAYING * first.iteration_time_s
    said = tuple((name, seconds) for name, seconds in saved if abs(seconds) >= worth)
    return StrategyComparison(changes, said, tuple(_sentences(first, second, said)))


def _sentences(first: Prediction, second: Prediction, saved: tuple[tuple[str, float], ...]) -> list[str]:
    gain = second.iteration_time_s - first.iteration_time_s
    share = gain / second.iteration_time_s if second.iteration_time_s else 0.0
    if gain <= 0:
        lines = ["Both are predicted to take the same time."]
    else:
        part = f"{share:.1%}" if share >= _LEAST_SHARE else f"below {_LEAST_SHARE:.1%}"
        lines = [f"An iteration takes {time_text(gain)} less ({part})."]
    shorter = [f"{TIME_NAMES[name]} ({time_text(seconds)})" for name, seconds in saved if seconds > 0]
    longer = [f"{TIME_NAMES[name]} ({time_text(-seconds)})" for name, seconds in saved if seconds < 0]
    if shorter:
        lines.append(f"It saves in {_listed(shorter)}.")
    if longer:
        lines.append(f"It pays with more in {_listed(longer)}.")
    if first.memory and second.memory:
        difference = second.peak_memory_bytes - first.peak_memory_bytes
        word = "less" if difference >= 0 else "more"
        lines.append(f"The fullest rank holds {bytes_text(abs(difference))} {word}.")
    if first.interval_s and second.interval_s and first.interval_s[1] >= second.interval_s[0]:
        lines.append("Their intervals overlap: only a trial of both can tell which is faster.")
    return lines


def _value(entry: Ranked, dimension: Dimension) -> str:
    value = getattr(entry.strategy, dimension.name)
    if value is None:
        return dimension.none
    if isinstance(value, tuple):
        return numbers_text(value)
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
