"""The predicted utilisation of a strategy beside the best that anybody published, and the assumption behind it."""

from dataclasses import dataclass
from math import exp, log, log1p

from megatron_terapipe.search.cost.cost_model import CostModel
from megatron_terapipe.search.op_times.constants import moved
from megatron_terapipe.search.op_times.profile_factors import ProfileFactors
from megatron_terapipe.search.op_times.roofline import Roofline
from megatron_terapipe.search.rank.ranked import Ranked
from megatron_terapipe.search.rank.sensitivity import moves_of, with_constants
from megatron_terapipe.search.report.figures import flops_utilization
from megatron_terapipe.search.report.published_utilisation import PublishedUtilization, best_published

TOLERANCE = 0.03
"""Share of the peak by which a prediction may be above the best published one before somebody must say why."""

MOST = log(3.0)
"""Change of the logarithm of a constant beyond which it explains nothing."""

STEPS = 6
"""Simulations that look for the value of the constant."""


@dataclass(frozen=True, kw_only=True)
class DoubtedConstant:
    """A constant that could explain a utilisation that nobody has published."""

    name: str
    """Of the constant that moves the time most."""
    value: float
    """What it is."""
    needed: float | None
    """What it would have to be for the published share; None = no value of it alone does that."""


@dataclass(frozen=True, kw_only=True)
class UtilizationCheck:
    """A utilisation that nobody has published, and what it rests on."""

    predicted: float
    """Share of the peak."""
    predicted_causal: float
    """The same without the scores that causal attention never computes."""
    published: PublishedUtilization
    """The best published."""
    constant: DoubtedConstant | None
    """On which it depends most; None = it is the convention, which counts scores that are not computed: with causal
    attention the share is one that was published."""


def check_utilization(entry: Ranked, model: CostModel) -> UtilizationCheck | None:
    """Return what to doubt where a strategy is predicted to beat all published runs; None where it is not."""
    assert entry.prediction is not None
    time_s, published = entry.prediction.iteration_time_s, best_published(model.cluster)
    used, causal = (
        flops_utilization(entry.strategy, model.workload, model.cluster, time_s, model.precision, causal=each)
        for each in (False, True)
    )
    if published is None or used <= published.share + TOLERANCE:
        return None
    constant = None
    if causal > published.causal_share + TOLERANCE:
        constant = _doubted(entry, time_s, log(causal / published.causal_share), model)
    return UtilizationCheck(predicted=used, predicted_causal=causal, published=published, constant=constant)


def _doubted(entry: Ranked, time_s: float, target: float, model: CostModel) -> DoubtedConstant:
    """Return the constant that moves the time most, and its value with which a strategy takes longer.

    Args:
        target: logarithm of how much longer it is to take.
    """
    constants = model.efficiency if isinstance(model.op_times, Roofline) else ProfileFactors()

    def log_time(name: str, logarithm: float) -> float:
        then = with_constants(model, moved(constants, [name], logarithm))
        return log(then.predict_time(entry.strategy).iteration_time_s / time_s)

    slopes = {
        name: log_time(name, log1p(change)) / log1p(change)
        for name, change, _ in moves_of(constants)
        if isinstance(getattr(constants, name), float)
    }
    constant = max(slopes, key=lambda name: abs(slopes[name]))
    at, slope, needed = 0.0, slopes[constant], None
    for _ in range(STEPS):
        at = max(-MOST, min(MOST, at + (target - (log_time(constant, at) if at else 0.0)) / slope))
    value = float(getattr(constants, constant))
    if abs(log_time(constant, at) - target) < 0.01:
        needed = value * exp(at)
    return DoubtedConstant(name=constant, value=value, needed=needed)
