"""Prices of single strategies, and the search over all of AMP's space."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from deepspeed_ext.plan.errors import PlanError
from examples.amp.deepspeed_costs import DeepSpeedCosts
from examples.amp.experiments import TENSOR_PARALLEL_SIZES, Experiment
from examples.amp.partitions import candidate_partitions, partition_of_amp
from megatron_terapipe.errors import ConfigError, DataError
from megatron_terapipe.search.cost.prediction import Prediction
from megatron_terapipe.search.cost.pricing import Pricing
from megatron_terapipe.strategy import Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class Priced:
    """A strategy and what is predicted of it."""

    strategy: Strategy
    prediction: Prediction | None
    """None if it does not fit the model or the cluster."""
    reason: str = ""
    """Why it cannot run; empty = it can."""
    rank: int = 0
    """By time, those that can run first."""
    index: int = 0
    """Line of the file that it is from."""

    def to_json(self) -> dict[str, Any]:
        """Its object in the JSON output."""
        return {
            "rank": self.rank,
            "index": self.index,
            "strategy": self.strategy.to_json(),
            "predicted": None if self.prediction is None else self.prediction.to_json(),
            "feasible": not self.reason,
            "reason": self.reason or None,
        }


def price(pricing: Pricing, strategy: Strategy, *, given_partition: bool = True) -> Priced:
    """Price one strategy.

    Args:
        given_partition: whether its stage partition is to be kept; else the best one is found.
    """
    fixed = _what_is_fixed(strategy)
    if fixed:
        return Priced(strategy=strategy, prediction=None, reason=fixed)
    try:
        if given_partition:
            return _priced(pricing, strategy)
        return _with_best_partition(pricing, strategy)
    except (ConfigError, DataError, PlanError) as error:
        return Priced(strategy=strategy, prediction=None, reason=str(error))


def with_partition_of_amp(pricing: Pricing, strategy: Strategy) -> Strategy:
    """The strategy with the stage partition that AMP chooses; as it is where it has too few layers or devices."""
    costs = pricing.cost_model
    assert isinstance(costs, DeepSpeedCosts)
    try:
        return replace(strategy, stage_partition=partition_of_amp(costs, strategy).bounds)
    except (ConfigError, PlanError, KeyError):
        return strategy


def search(experiment: Experiment, pricing: Pricing) -> list[Priced]:
    """Price all of AMP's space, each strategy with its best stage partition; the best one first."""
    return ranked([price(pricing, each, given_partition=False) for each in strategies(experiment)])


def strategies(experiment: Experiment) -> Iterator[Strategy]:
    """AMP's space: tensor-parallel ranks on one node, all devices, every micro-batch size that divides the batch."""
    batch, num_devices = experiment.global_batch_size, experiment.cluster().num_devices
    for tensor in TENSOR_PARALLEL_SIZES:
        for data in _divisors(num_devices // tensor):
            if batch % data:
                continue
            for micro_batch_size in _divisors(batch // data):
                yield Strategy(
                    data_parallel_size=data,
                    tensor_parallel_size=tensor,
                    pipeline_parallel_size=num_devices // (tensor * data),
                    micro_batch_size=micro_batch_size,
                    global_batch_size=batch,
                    zero_stage=0,
                )


def ranked(priced: list[Priced]) -> list[Priced]:
    """Strategies by rank: first those that can run, then those too large, then those that do not fit the model."""

    def key(each: Priced) -> tuple[bool, bool, float]:
        missing = each.prediction is None
        return missing, bool(each.reason), 0.0 if each.prediction is None else each.prediction.iteration_time_s

    return [replace(each, rank=rank) for rank, each in enumerate(sorted(priced, key=key), 1)]


def _what_is_fixed(strategy: Strategy) -> str:
    """Why DeepSpeed 0.3.13 as AMP used it cannot run a strategy; empty = it can."""
    for name, only in (
        ("num_model_chunks", 1),
        ("num_token_slices", 1),
        ("recompute", "none"),
        ("sequence_parallel", False),
        ("schedule", "1f1b"),
    ):
        value = getattr(strategy, name)
        if value != only:
            return f"strategy: {name} {value!r} is not what AMP's trials ran: use {only!r}, or `search predict`"
    return ""


def _with_best_partition(pricing: Pricing, strategy: Strategy) -> Priced:
    """The fastest of the candidate partitions that fit into memory; if none does, the fastest."""
    costs = pricing.cost_model
    assert isinstance(costs, DeepSpeedCosts)
    candidates = [replace(strategy, stage_partition=each.bounds) for each in candidate_partitions(costs, strategy)]
    candidates.sort(key=lambda each: costs.predict_time(each).iteration_time_s)
    for candidate in candidates:
        if pricing.why_it_does_not_fit(candidate, pricing.memory_model.predict(candidate)) is None:
            return _priced(pricing, candidate)
    return _priced(pricing, candidates[0])


def _priced(pricing: Pricing, strategy: Strategy) -> Priced:
    prediction = pricing.predict(strategy)
    reason = pricing.why_it_does_not_fit(strategy, prediction.memory) or ""
    return Priced(strategy=strategy, prediction=prediction, reason=reason)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
