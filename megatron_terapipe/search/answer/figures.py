"""Figures that follow from a prediction, and the columns of a ranking."""

from collections import Counter
from collections.abc import Sequence

from megatron_terapipe.config.flops import BACKWARD_PER_FORWARD
from megatron_terapipe.dimensions import Dimension, ordered_for
from megatron_terapipe.search.answer.json_documents import DecisionPart, RankedEntry, Ranking
from megatron_terapipe.search.machine.cluster import Cluster
from megatron_terapipe.search.machine.library import is_guess
from megatron_terapipe.search.machine.trainers import TERAPIPE
from megatron_terapipe.search.price.price_document import PredictedPart, Speed
from megatron_terapipe.search.price.workload import Workload
from megatron_terapipe.search.rank.space import SearchProblem
from megatron_terapipe.strategy import DIMENSIONS, Strategy
from megatron_terapipe.texts import bytes_text, count_text, time_text


def model_flops(workload: Workload, *, causal: bool = False) -> float:
    """Return the FLOPs of one sequence, forward and backward, counted as the trainer's `iteration_flops` counts."""
    return (1.0 + BACKWARD_PER_FORWARD) * sum(layer.model_flops(causal=causal) for layer in workload.layers)


def speed_of(problem: SearchProblem, strategy: Strategy, iteration_time_s: float) -> Speed:
    """Return the published figures that follow from the seconds of an iteration.

    The MFU is defined by Chowdhery et al. (arXiv 2204.02311 appendix B), over the peak of the devices in use.
    """
    workload, nodes = problem.workload, problem.cluster.nodes
    tokens_per_s = strategy.num_sequences * workload.seq_length / iteration_time_s
    flops, causal_flops = (
        model_flops(workload, causal=causal) * strategy.num_sequences / iteration_time_s for causal in (False, True)
    )
    used = nodes_in_use(strategy, problem.cluster).items()
    peak = sum(count * nodes[index].device.peak_flops(problem.precision) for index, count in used)
    peak_is_known = not any(map(is_guess, {node.device.name for node in nodes}))
    mfu, mfu_causal = (each / peak if peak else 0.0 for each in (flops, causal_flops))
    return Speed(
        iteration_time_s=iteration_time_s,
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_device=tokens_per_s / strategy.world_size,
        tflops_per_device=flops / strategy.world_size / 1e12,
        tflops_per_device_causal=causal_flops / strategy.world_size / 1e12,
        mfu=mfu if peak_is_known else None,
        mfu_causal=mfu_causal if peak_is_known else None,
    )


def nodes_in_use(strategy: Strategy, cluster: Cluster) -> Counter[int]:
    """Return the number of devices with a rank of each node, by its index."""
    of_device = cluster.node_of_device
    if strategy.placement is None:
        return Counter(of_device[: strategy.world_size])
    return Counter(of_device[place] for place in strategy.placement if place < len(of_device))


def devices_of(cluster: Cluster, strategy: Strategy | None = None) -> dict[str, int]:
    """Return the number of devices of each kind; `strategy`: only those that have a rank."""
    found: Counter[str] = Counter()
    used = Counter(cluster.node_of_device) if strategy is None else nodes_in_use(strategy, cluster)
    for index, number in used.items():
        found[cluster.nodes[index].device.name] += number
    return dict(found)


def interval_text(prediction: PredictedPart) -> str:
    """Return how far the time may be off, as `-4 +6 %`; empty if the prediction has no interval."""
    if prediction.interval_s is None or not prediction.iteration_time_s:
        return ""
    low, high = (100 * (bound / prediction.iteration_time_s - 1) for bound in prediction.interval_s)
    return f"{low:+.0f} {high:+.0f} %"


def share_text(share: float | None) -> str:
    """Return a share in per cent as text; empty where it is not known."""
    return "" if share is None else f"{share:.0%}"


def decision_texts(decision: DecisionPart | None) -> dict[str, str]:
    """Return the figures of a training that were asked for, by the names of their columns."""
    if decision is None:
        return {}
    each = "" if decision.days is not None else "/M tokens"
    figures = {"days": decision.days, f"device hours{each}": decision.device_hours, f"price{each}": decision.cost}
    return {name: count_text(figure) for name, figure in figures.items() if figure is not None}


COLUMNS = ordered_for(DIMENSIONS, "column")  # dimensions of a strategy that have a column, and its name
LEFT = (*(name for each, name in COLUMNS if each.is_text), "why not")

USUAL = {name: each.usual for each, name in COLUMNS if each.usual}
"""Columns that are left out where every row has this text."""


def heading(ranking: Ranking) -> str:
    """Return the model, the batch and the cluster of a ranking in one line."""
    model, nodes = ranking.model, ranking.cluster.num_nodes
    batch = "" if ranking.global_batch_size is None else f" x {ranking.global_batch_size}"
    trainer = "" if ranking.software == TERAPIPE.name else f", trainer {ranking.software}"
    listed = " + ".join(f"{count:,} x {name}" for name, count in ranking.cluster.devices.items())
    return (
        f"{model.name} ({count_text(model.parameters)}), {model.seq_length:,}{batch} tokens a step, on "
        f"{listed} in {nodes} node{'s' if nodes > 1 else ''}, {ranking.precision}{trainer}"
    )


def cells(entry: RankedEntry) -> dict[str, str]:
    """Return the text of each column for an entry, by its name."""
    strategy, prediction = Strategy.from_json(entry.strategy), entry.predicted
    row = {"rank": str(entry.rank), **{name: _cell(each, strategy) for each, name in COLUMNS}}
    if prediction is not None:
        row |= {
            "time": time_text(prediction.iteration_time_s),
            "interval": interval_text(prediction),
            "tokens/s": f"{prediction.tokens_per_s:,.0f}",
            "MFU": share_text(prediction.mfu),
            "causal MFU": share_text(prediction.mfu_causal),
            "bubble": f"{prediction.bubble_ratio:.1%}",
            "memory": bytes_text(prediction.peak_memory_bytes) if prediction.memory_per_rank else "",
            **decision_texts(entry.decision),
        }
    return row | {"variants": f"{entry.variants:,}" if entry.variants else "", "why not": entry.reason or ""}


def rows_of(entries: Sequence[RankedEntry]) -> tuple[list[str], list[dict[str, str]]]:
    """Return the names of the columns with any text, and the rows."""
    rows = [cells(entry) for entry in entries]
    names = list(dict.fromkeys(name for row in rows for name in row))
    # Prices come before the reason, also where the first row has none.
    names.sort(key=lambda name: name == "why not")
    return [name for name in names if any(row.get(name, "") not in ("", USUAL.get(name)) for row in rows)], rows


def _cell(dimension: Dimension, strategy: Strategy) -> str:
    value = getattr(strategy, dimension.name)
    if value is None:
        return dimension.none
    return str(value) if not isinstance(value, bool) else "yes" if value else "no"
