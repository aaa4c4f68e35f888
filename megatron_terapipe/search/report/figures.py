"""Figures that follow from a prediction, and how times, sizes and speeds are written."""

from megatron_terapipe.dimensions import in_places
from megatron_terapipe.search.cost.prediction import Prediction
from megatron_terapipe.search.inputs.cluster import Cluster
from megatron_terapipe.search.inputs.workload import Workload
from megatron_terapipe.strategy import DIMENSIONS, Strategy

GIGABYTE = 1e9


def sequences(strategy: Strategy) -> int:
    """Sequences of one optimizer step."""
    return strategy.micro_batch_size * strategy.data_parallel_size * strategy.num_micro_batches


def tokens_per_s(strategy: Strategy, workload: Workload, iteration_time_s: float) -> float:
    """Tokens trained on in a second."""
    return sequences(strategy) * workload.seq_length / iteration_time_s


def model_flops(workload: Workload) -> float:
    """FLOPs of the model for one sequence, forward and backward, as published utilizations count them.

    Every token counts as if it attended to the whole sequence, and nothing is recomputed (Korthikanti et al., arXiv
    2205.05198 appendix A); the trainer's logs count so, too (`config.flops.iteration_flops`).
    """
    forward = sum(layer.tokens * layer.linear_flops_per_token for layer in workload.layers)
    for layer in workload.layers:
        if layer.attention is not None:
            positions = layer.attention.window or layer.tokens
            forward += layer.tokens * positions * layer.attention.flops_per_position
    # The backward of a product is two products of its size.
    return 3.0 * forward


def flops_utilization(
    strategy: Strategy, workload: Workload, cluster: Cluster, iteration_time_s: float, precision: str
) -> float:
    """Model FLOPs over those that the devices in use could do (MFU; Chowdhery et al., arXiv 2204.02311 appendix B)."""
    nodes = [node for node in cluster.nodes for _ in range(node.num_devices)]
    places = strategy.placement or range(strategy.world_size)
    peak = sum(nodes[place].device.peak_flops(precision) for place in places if place < len(nodes))
    return model_flops(workload) * sequences(strategy) / (iteration_time_s * peak) if peak else 0.0


def time_text(seconds: float) -> str:
    """Seconds with three digits that count."""
    for scale, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * scale >= 1 or unit == "us":
            return f"{seconds * scale:.3g} {unit}" if seconds * scale < 1000 else f"{seconds * scale:,.0f} {unit}"
    raise AssertionError


def interval_text(prediction: Prediction) -> str:
    """How far the time may be off, as `-4 +6 %`; empty where nobody knows."""
    if prediction.interval_s is None or not prediction.iteration_time_s:
        return ""
    low, high = (100 * (bound / prediction.iteration_time_s - 1) for bound in prediction.interval_s)
    return f"{low:+.0f} {high:+.0f} %"


def bytes_text(num_bytes: float) -> str:
    """Bytes in units of 1000, as data sheets and `peak_memory_gb` count them."""
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes / 1e3:.3g} kB"


def count_text(number: float) -> str:
    """A large number in short: `12.9 B`."""
    for scale, unit in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if number >= scale:
            return f"{number / scale:.3g}{unit}"
    return f"{number:.3g}"


def strategy_text(strategy: Strategy) -> str:
    """Return a strategy in one line, as `dp 4 · tp 8 · pp 2 · micro-batch 1 · 1f1b`; what is usual is left out."""
    parts = [
        template.format(getattr(strategy, each.name))
        for each, template in in_places(DIMENSIONS, "phrase")
        if each.always or getattr(strategy, each.name) != each.default
    ]
    return " · ".join(parts)
