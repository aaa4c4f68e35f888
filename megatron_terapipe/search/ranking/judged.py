"""One strategy that somebody names: can it run, and what would it cost?"""

from dataclasses import replace

from deepspeed_ext.plan.errors import PlanError
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.pricing import Pricing
from megatron_terapipe.search.ranking.ranked import Ranked
from megatron_terapipe.search.space import Problem
from megatron_terapipe.search.space.walk import broken_rule
from megatron_terapipe.strategy import Strategy


def judged(strategy: Strategy, problem: Problem, pricing: Pricing, index: int = 0) -> Ranked:
    """Hold a strategy to all rules, and price it. What cannot run has a reason, and a price where there is one.

    Args:
        strategy: any.
        problem: model and cluster; the batch is the strategy's own.
        pricing: on the cluster of the problem.
        index: place in what was asked for.
    """
    entry = Ranked(strategy=strategy, prediction=None, index=index)
    try:
        reason = broken_rule(strategy, problem)
        if reason is not None:
            return replace(entry, feasible=False, reason=reason)
        prediction = pricing.predict(strategy)
        reason = pricing.why_it_does_not_fit(strategy, prediction.memory)
    except (ConfigError, PlanError) as error:
        return replace(entry, feasible=False, reason=str(error).removeprefix("strategy: "))
    return replace(entry, prediction=prediction, feasible=reason is None, reason=reason)
