"""Why strategies did not win: counts of the rules that rejected them, and one strategy beside the winner."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_terapipe.search.command.costs import Costs
from megatron_terapipe.search.cost.prediction import Prediction
from megatron_terapipe.search.rank.grid.grid_prices import FITS, HEADROOM
from megatron_terapipe.search.rank.ranked import predict_one
from megatron_terapipe.search.rank.search import ROUNDING, SearchResult
from megatron_terapipe.search.report.advice import Advice, distance_text, remedies_text
from megatron_terapipe.search.report.comparison import compare
from megatron_terapipe.search.report.figures import bytes_text, strategy_text, time_text
from megatron_terapipe.search.space.choices import Choices
from megatron_terapipe.search.space.legal_grids import USES_DEVICES
from megatron_terapipe.search.space.problem import SearchProblem
from megatron_terapipe.search.space.rules import DUPLICATE_RULES
from megatron_terapipe.strategy import DIMENSIONS, Strategy


def explain_space(result: SearchResult) -> list[str]:
    """Return lines that say how many strategies each rule rejected."""
    rows = [(name, f"{number:,}") for name, number in result.counts.lines()]
    wide = max(len(name) for name, _ in rows)
    lines = [f"{name:<{wide}}  {number:>14}" for name, number in rows]
    lines += [f"  {strategy_text(entry.strategy)}: {entry.reason}" for entry in result.refused[:3]]
    return lines


def explain_strategy(
    strategy: Strategy,
    problem: SearchProblem,
    result: SearchResult,
    costs: Costs,
    *,
    choices: Choices,
    constraints: Mapping[str, tuple[Any, ...]],
) -> list[str]:
    """Return lines that say why a strategy did not win.

    Args:
        strategy: which; without a global batch size it takes the problem's.
        choices: values of each dimension that were searched.
    """
    if strategy.global_batch_size is None and not problem.global_batch_size % (
        strategy.micro_batch_size * strategy.data_parallel_size
    ):
        strategy = replace(strategy, global_batch_size=problem.global_batch_size)
    pricing = costs.pricing_on(problem.cluster)
    entry = predict_one(strategy, problem, pricing)
    title = f"why not {strategy_text(strategy)}?"
    if not entry.feasible or entry.prediction is None:
        return [title, f"  It cannot run: {entry.reason}."]
    lines = [title, f"  It takes {time_text(entry.prediction.iteration_time_s)} and {_peak(entry.prediction)}."]
    too_full = pricing.why_it_does_not_fit(strategy, entry.prediction.memory, problem.memory_headroom)
    left_out = [
        *_other_question(strategy, problem, result),
        *_not_searched(strategy, choices, constraints),
        *([f"It leaves too little memory free ({too_full})."] if too_full is not None else []),
    ]
    lines += [f"  {reason}" for reason in left_out]
    if not result.entries:
        return lines
    winner = result.entries[0]
    assert winner.prediction is not None
    time_s, best_s = entry.prediction.iteration_time_s, winner.prediction.iteration_time_s
    if time_s < best_s * (1 - ROUNDING):
        words = f"  It is {1 - time_s / best_s:.1%} faster than the winner"
        lines.append(f"{words}." if left_out else f"{words}: the search did not come to it; more --effort does.")
    elif time_s <= best_s * (1 + ROUNDING):
        return [*lines, "  It is as fast as the winner."]
    comparison = compare(winner, entry)
    lines += [f"  {words}: the winner has {value}, and it {other}" for words, value, other in comparison.changes]
    if time_s > best_s:
        lines += ["  The winner beside it:", *(f"    {sentence}" for sentence in comparison.sentences)]
    return lines


def _other_question(strategy: Strategy, problem: SearchProblem, result: SearchResult) -> list[str]:
    """Return in what the strategy answers another question than the search."""
    found = []
    if strategy.world_size != problem.cluster.num_devices:
        found.append(
            f"It uses {strategy.world_size} of the {problem.cluster.num_devices} devices, and every strategy of the "
            "ranking uses all (--devices-at-most)."
        )
    if strategy.global_batch_size != problem.global_batch_size:
        found.append(f"Its batch of {strategy.global_batch_size} sequences is not the one that was searched for.")
    stages = {entry.strategy.zero_stage for entry in result.entries}
    if problem.precision == "bf16" and stages and strategy.zero_stage < min(stages):
        found.append("ZeRO 0 adds bf16 gradients up in bf16, with few digits: set --zero-stage 0 to search it.")
    return found


def _not_searched(strategy: Strategy, choices: Choices, constraints: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """Return the values of a strategy that flags or the search itself leave out."""
    found = []
    for each in DIMENSIONS:
        value, values = getattr(strategy, each.name), choices.values.get(each.name)
        if each.name == "token_slices":
            # One flag gives one list; without it lengths are solved for.
            values = None if values is None else (values,)
        elif isinstance(value, tuple) and each.name not in constraints:
            continue  # layers of stages are solved for
        if values is None or value in values:
            continue
        if each.name in constraints:
            found.append(f"{each.flag} leaves it out: {_text(value)} is not {' or '.join(map(_text, values))}.")
        else:
            found.append(f"The search does not try {each.name} {_text(value)} where no flag asks for it: {each.flag}.")
    return found


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _peak(prediction: Prediction) -> str:
    return f"{bytes_text(prediction.peak_memory_bytes)} on the fullest rank"


def nothing_fits(result: SearchResult, advice: Advice, problem: SearchProblem) -> str:
    """Return why no strategy is left, and what to change: the rule that the last ones broke, and the remedy.

    Args:
        advice: with the distance to fit, where memory is the reason.
    """
    doubles = {rule.name for rule in DUPLICATE_RULES}
    rejected = [(name, number) for name, number in result.counts.rejected.items() if number and name not in doubles]
    if not rejected:
        return "no strategy can run: no layout of the ranks has the sizes that flags fix; drop one of these flags"
    if result.too_full is not None:
        with_room = "" if advice.distance is None else f"; one would with {remedies_text(advice.distance, problem)}"
        return (
            f"no strategy can run: {result.counts.rejected[HEADROOM]:,} fit the devices, but none keeps as much memory "
            f"free as --memory-headroom asks for{with_room}"
        )
    nearest = "" if advice.distance is None else f": {distance_text(advice.distance, problem)}"
    last, number = rejected[-1]
    if last in (FITS, HEADROOM):
        return (
            f"no strategy can run: all {number:,} that keep the other rules need more memory than the devices have"
            f"{nearest}"
        )
    if last == USES_DEVICES:
        devices = problem.cluster.num_devices
        return (
            f"no strategy can run: the parallel sizes that flags fix do not divide the {devices} devices: give "
            f"divisors of {devices}, or use fewer devices with --devices-at-most"
        )
    return (
        f"no strategy can run: the last {number:,} break the rule '{last}'; drop a flag that fixes a dimension, or "
        "take another batch or fewer devices with --devices-at-most (--explain counts every rule)"
    )
