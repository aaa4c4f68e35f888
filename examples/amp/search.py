"""Prices of single strategies, their stage partitions, and the search over all of AMP's space.

The best partition is our solver's; AMP has another objective.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.layout import StagePartition
from examples.amp.deepspeed_costs import DeepSpeedCosts
from examples.amp.experiments import TENSOR_PARALLEL_SIZES, Experiment
from examples.amp.partition import Numbers, StageTimes, solve, stage_times
from megatron_terapipe.errors import ConfigError, DataError
from megatron_terapipe.search.price.cost_model import Prediction, Pricing
from megatron_terapipe.strategy import Strategy

CAPS = 4
"""Limits on the parameters of a stage that are tried: a balance of compute and a balance of reductions differ."""


def candidate_partitions(costs: DeepSpeedCosts, strategy: Strategy) -> list[StagePartition]:
    """Candidates for the best partition: each is exact for another treatment of costs outside of stages.

    Messages hide under other micro-batches in part: they are counted once as if all did, and once as if none. Gradients
    are reduced when the pipeline is empty, by the stage with most parameters, which is not a sum over stages: limits on
    it, from none to the tightest there is, turn it into one.
    """
    num_stages, num_layers = strategy.pipeline_parallel_size, len(costs.workload.layers)
    if num_stages == 1:
        return [StagePartition((0, num_layers))]
    messages = costs.messages_s(strategy)
    cuts = np.zeros((num_stages - 1, num_layers + 1))
    cuts[:, 1:] = messages.there + messages.back
    layers = np.add(*costs.layer_times_s(strategy))
    hidden, exposed = (times_with_cuts(layers, num_stages, cuts, blocking=each) for each in (False, True))
    found = [solve(times, strategy.num_micro_batches)[0] for times in (hidden, exposed)]
    if strategy.data_parallel_size > 1:
        sizes = np.array([float(layer.parameters) for layer in costs.workload.layers])
        before = np.concatenate([[0.0], np.cumsum(sizes)])
        of_run = before[None, :] - before[:, None]
        tightest = _most(of_run, StagePartition.balanced(sizes.tolist(), num_stages))
        for cap in np.linspace(tightest, _most(of_run, found[0]), CAPS, endpoint=False):
            within = of_run[None] <= cap * (1 + 1e-9)
            limited = StageTimes(np.where(within, hidden.period_s, np.inf), np.where(within, hidden.fill_s, np.inf))
            found.append(solve(limited, strategy.num_micro_batches)[0])
    return list(dict.fromkeys(found))


def times_with_cuts(
    layer_times_s: Numbers, num_stages: int, cut_times_s: Numbers, *, blocking: bool = False
) -> StageTimes:
    """Return the times of stages with the transfers at their ends.

    Args:
        layer_times_s: [L] or [num_stages, L] seconds of the layers.
        cut_times_s: [L + 1], or [num_stages - 1, L + 1] by boundary of stages: transfers of one micro-batch, both
            ways, where the layers before that index end a stage.
        blocking: whether a transfer keeps both its stages from computing; else it only delays the first micro-batch.
    """
    times = stage_times(layer_times_s, num_stages)
    if num_stages > 1:
        cuts = np.broadcast_to(np.atleast_2d(cut_times_s), (num_stages - 1, times.num_layers + 1))
        # Each cut counts once in the sum: with the stage that ends there.
        times.fill_s[:-1] += cuts[:, None, :]
        if blocking:
            times.period_s[:-1] += cuts[:, None, :]
            times.period_s[1:] += cuts[:, :, None]
    return times


def _most(of_run: Numbers, partition: StagePartition) -> float:
    """Parameters of the stage with most of them."""
    return float(max(of_run[first, end] for first, end in pairwise(partition.bounds)))


def amp_partition(
    layer_times_s: Numbers, cut_times_s: Numbers, num_stages: int, num_micro_batches: int
) -> tuple[StagePartition, float]:
    """The best partition under AMP's objective: (M - 1) x slowest stage + all stages + each cut once.

    Args:
        layer_times_s: [L] forward and backward of one micro-batch.
        cut_times_s: [num_stages - 1, L + 1] one activation, by boundary and first layer after it.
        num_micro_batches: M; with one AMP deals layers evenly, which is the result of M = 2.
    """
    return solve(times_with_cuts(layer_times_s, num_stages, cut_times_s), max(num_micro_batches, 2))


def partition_of_amp(costs: DeepSpeedCosts, strategy: Strategy) -> StagePartition:
    """The partition that AMP chooses, but for those that its solver misses (`src/pipe.py`, `src/cost_*.py`).

    AMP takes the mean of the profiles over all devices, three forwards for both passes, and as much for a cut wherever
    it is, so that cuts play no part. It deals the layers that compute; the others go with the one before them. With one
    micro-batch it deals transformer layers evenly.
    """
    num_stages, workload = strategy.pipeline_parallel_size, costs.workload
    blocks = [index for index, layer in enumerate(workload.layers) if layer.kind == "block"]
    uneven = any(workload.layers[index].tokens != workload.layers[blocks[0]].tokens for index in blocks)
    work = [0, *blocks] if uneven else list(range(len(workload.layers)))
    if strategy.num_micro_batches == 1:
        even = StagePartition.uniform(len(blocks), num_stages).bounds
        inner = [blocks[bound] for bound in even[1:-1]]
    else:
        names = [node.device.name for node in costs.cluster.nodes for _ in range(node.num_devices)]
        size = strategy.tensor_parallel_size
        times = np.array([[costs.published[name][index][size] for index in work] for name in names])
        solved, _ = amp_partition(times.mean(axis=0), np.zeros(len(work) + 1), num_stages, strategy.num_micro_batches)
        inner = [work[bound - 1] + 1 for bound in solved.bounds[1:-1]]
    return StagePartition((0, *inner, len(workload.layers)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Priced:
    """A strategy and its prediction."""

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
    fixed = _unsupported(strategy)
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


def _unsupported(strategy: Strategy) -> str:
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
            return f"strategy: {name} {value!r} is not a value of AMP's trials: use {only!r}, or `search predict`"
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
