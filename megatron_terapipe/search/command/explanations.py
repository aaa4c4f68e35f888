"""Why a space is as small as it is, and why a strategy did not win, in lines for a reader."""

from dataclasses import replace

from megatron_terapipe.search.command.costs import Costs
from megatron_terapipe.search.prediction import Prediction
from megatron_terapipe.search.ranking.judged import judged
from megatron_terapipe.search.ranking.search import SearchResult
from megatron_terapipe.search.report.comparison import compare
from megatron_terapipe.search.report.figures import bytes_text, strategy_text, time_text
from megatron_terapipe.search.space import Problem
from megatron_terapipe.strategy import Strategy


def explain_space(result: SearchResult) -> list[str]:
    """How many strategies each rule rejected."""
    rows = [(name, f"{number:,}") for name, number in result.funnel.lines()]
    wide = max(len(name) for name, _ in rows)
    lines = [f"{name:<{wide}}  {number:>14}" for name, number in rows]
    lines += [f"  {strategy_text(entry.strategy)}: {entry.reason}" for entry in result.refused[:3]]
    return lines


def explain_strategy(strategy: Strategy, problem: Problem, result: SearchResult, costs: Costs) -> list[str]:
    """Why a strategy did not win.

    Args:
        strategy: which; without a global batch size it takes the problem's.
        problem: what was asked.
        result: what was answered.
        costs: prices it as all the others were priced.
    """
    if strategy.global_batch_size is None and not problem.global_batch_size % (
        strategy.micro_batch_size * strategy.data_parallel_size
    ):
        strategy = replace(strategy, global_batch_size=problem.global_batch_size)
    entry = judged(strategy, problem, costs.pricing_on(problem.cluster))
    title = f"why not {strategy_text(strategy)}?"
    if not entry.feasible or entry.prediction is None:
        return [title, f"  It cannot run: {entry.reason}."]
    lines = [title, f"  It takes {time_text(entry.prediction.iteration_time_s)} and {_peak(entry.prediction)}."]
    if strategy.global_batch_size != problem.global_batch_size:
        lines.append(f"  Its batch of {strategy.global_batch_size} sequences is not the one that was searched for.")
    if not result.entries:
        return lines
    winner = result.entries[0]
    assert winner.prediction is not None
    if problem.precision == "bf16" and strategy.zero_stage < winner.strategy.zero_stage:
        lines.append("  ZeRO 0 adds bf16 gradients up in bf16, with few digits: pin --zero-stage 0 to search it.")
    if entry.prediction.iteration_time_s <= winner.prediction.iteration_time_s:
        return [*lines, "  It is as fast as the winner."]
    comparison = compare(winner, entry)
    lines += [f"  {words}: {value} wins over {other}" for words, value, other in comparison.changes]
    return [*lines, *(f"  The winner: {sentence}" for sentence in comparison.sentences)]


def _peak(prediction: Prediction) -> str:
    return f"{bytes_text(prediction.peak_memory_bytes)} on the fullest rank"
