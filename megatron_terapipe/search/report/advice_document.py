"""The advice of an answer as an object of its JSON document; `advice_schema.py` declares the fields."""

from dataclasses import asdict

from megatron_terapipe.search.rank.distance_to_fit import DistanceToFit
from megatron_terapipe.search.rank.fewer_devices import FewerDevices
from megatron_terapipe.search.rank.ranked import Ranked
from megatron_terapipe.search.rank.sensitivity import OtherWinner, Sensitivity
from megatron_terapipe.search.report.advice import Advice, TooFull
from megatron_terapipe.search.report.rivals import rival_part
from megatron_terapipe.search.report.schema.advice_schema import (
    AdvicePart,
    DistancePart,
    FewerDevicesPart,
    FoundOrderPart,
    OtherWinnerPart,
    RemedyPart,
    SensitivityPart,
    TooFullPart,
    UtilizationPart,
)
from megatron_terapipe.search.report.utilisation_check import UtilizationCheck


def advice_part(advice: Advice) -> AdvicePart:
    """Return what a document says of advice."""
    return AdvicePart(
        memory_headroom=advice.memory_headroom,
        too_full=None if advice.too_full is None else _too_full(advice.too_full),
        fewer_devices=[_fewer_devices(part) for part in advice.fewer_devices],
        sensitivity=None if advice.sensitivity is None else _sensitivity(advice.sensitivity),
        utilization=None if advice.utilization is None else _utilization(advice.utilization),
        distance_to_fit=None if advice.distance is None else _distance(advice.distance),
        rivals=[rival_part(each) for each in advice.rivals],
        found_order=None if advice.found_order is None else _found_order(advice.found_order, advice.found_order_saves),
    )


def _found_order(entry: Ranked, saves: float) -> FoundOrderPart:
    assert entry.prediction is not None
    return FoundOrderPart(
        strategy=entry.strategy.to_json(),
        iteration_time_s=entry.prediction.iteration_time_s,
        peak_memory_bytes=entry.prediction.peak_memory_bytes,
        could_save=saves,
    )


def _too_full(full: TooFull) -> TooFullPart:
    assert full.entry.prediction is not None
    return TooFullPart(
        strategy=full.entry.strategy.to_json(),
        iteration_time_s=full.entry.prediction.iteration_time_s,
        left_free=full.left_free,
        could_save=full.could_save,
    )


def _fewer_devices(part: FewerDevices) -> FewerDevicesPart:
    assert part.entry.prediction is not None
    return FewerDevicesPart(
        num_devices=part.cluster.num_devices,
        nodes=[node.name for node in part.cluster.nodes],
        strategy=part.entry.strategy.to_json(),
        iteration_time_s=part.entry.prediction.iteration_time_s,
        time_ratio=part.time_ratio,
        cost_ratio=part.cost_ratio,
    )


def _sensitivity(found: Sensitivity) -> SensitivityPart:
    return SensitivityPart(
        changes=[_other_winner(each) for each in found.changes],
        nearest=None if found.nearest is None else _other_winner(found.nearest),
        num_constants=found.num_constants,
        num_contenders=found.num_contenders,
    )


def _other_winner(other: OtherWinner) -> OtherWinnerPart:
    return OtherWinnerPart(
        constant=other.constant,
        change=other.change,
        strategy=None if other.strategy is None else other.strategy.to_json(),
        regret=other.regret,
        is_memory=other.is_memory,
    )


def _utilization(check: UtilizationCheck) -> UtilizationPart:
    doubted = check.constant
    return UtilizationPart(
        predicted=check.predicted,
        predicted_causal=check.predicted_causal,
        published=check.published.share,
        published_causal=check.published.causal_share,
        published_run=check.published.run,
        constant=None if doubted is None else doubted.name,
        value=None if doubted is None else doubted.value,
        needed=None if doubted is None else doubted.needed,
    )


def _distance(distance: DistanceToFit) -> DistancePart:
    nearest = distance.nearest
    return DistancePart(
        strategy=nearest.strategy.to_json(),
        pipeline_rank=nearest.rank,
        memory={**asdict(nearest.memory), "total": nearest.memory.total},
        device=nearest.device.name,
        usable_bytes=nearest.usable_bytes,
        device_bytes=nearest.device_bytes,
        remedies=[
            RemedyPart(kind=each.kind, value=each.value, strategy=each.found.strategy.to_json())
            for each in distance.remedies
        ],
    )
