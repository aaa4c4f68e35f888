"""Trials worth running: a file of the strategies whose measurement would teach the search most."""

import json

from megatron_terapipe.search.calibrate.design import propose_strategies
from megatron_terapipe.search.command.costs import Costs
from megatron_terapipe.search.ranking.search import search
from megatron_terapipe.search.ranking.space_prices import Progress
from megatron_terapipe.search.report.launch import write_text
from megatron_terapipe.search.space import Choices, Problem

CANDIDATES = 100
"""Best strategies among which trials are chosen: those far behind would teach what nobody asks."""

NUM_TRIALS = 8
"""How many are proposed; as many as `benchmarks.few_trials` held against chosen at random."""


def write_proposals(path: str, problem: Problem, choices: Choices, costs: Costs, progress: Progress | None) -> str:
    """Choose trials, write them a line each as `trial --strategies` reads them, and say so.

    Args:
        path: of the file.
        problem: what is to be trained on what.
        choices: strategies that may be proposed.
        costs: what is known so far, and how surely.
        progress: shows how far the search of candidates is.

    Returns:
        A note for the answer.

    Raises:
        ConfigError: if the file cannot be written.
    """
    found = search(problem, choices, costs.pricing_on, top=CANDIDATES, progress=progress)
    candidates = [entry.strategy for entry in found.entries]
    model = costs.pricing_on(problem.cluster).cost_model
    chosen = propose_strategies(model, candidates, costs.calibration, NUM_TRIALS)
    write_text(path, "".join(json.dumps(strategy.to_json()) + "\n" for strategy in chosen))
    return (
        f"{path} has {len(chosen)} of the {len(candidates)} best strategies, the trials of which would teach most, the "
        f"most telling first: run them with `trial --strategies {path}`, then `rank --calibrate`"
    )
