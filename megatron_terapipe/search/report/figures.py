"""Figures that follow from a prediction, and the texts of times, sizes and speeds."""

from megatron_terapipe.dimensions import in_places
from megatron_terapipe.search.cost.prediction import Prediction
from megatron_terapipe.search.inputs.cluster import Cluster
from megatron_terapipe.search.inputs.workload import Workload
from megatron_terapipe.strategy import DIMENSIONS, Strategy

GIGABYTE = 1e9


def sequences(strategy: Strategy) -> int:
    """Return the sequences of one optimizer step."""
    return strategy.micro_batch_size * strategy.data_parallel_size * strategy.num_micro_batches


def tokens_per_s(strategy: Strategy, workload: Workload, iteration_time_s: float) -> float:
    """Return the tokens trained on in a second.

    Args:
        strategy: how the model is trained.
        workload: the model.
        iteration_time_s: seconds of one iteration.
    """
    return sequences(strategy) * workload.seq_length / iteration_time_s


def model_flops(workload: Workload) -> float:
    """Return the FLOPs of the model for one sequence, forward and backward, as published utilizations count them.

    Every token counts as if it attended to the whole sequence, or to as many tokens as a window has, and nothing is
    recomputed (Korthikanti et al., arXiv 2205.05198 appendix A); the trainer's logs count so, too
    (`config.flops.iteration_flops`).
    """
    forward = sum(layer.tokens * layer.linear_flops_per_token for layer in workload.layers)
    for layer in workload.layers:
        if layer.attention is not None:
            positions = layer.attention.most_positions(layer.tokens)
            forward += layer.tokens * positions * layer.attention.flops_per_position
    # The backward of a product is two products of its size.
    return 3.0 * forward


def flops_utilization(
    strategy: Strategy, workload: Workload, cluster: Cluster, iteration_time_s: float, precision: str
) -> float:
    """Return the share of the peak FLOP/s of the devices in use that the model takes, in [0, 1].

    It is the MFU of Chowdhery et al. (arXiv 2204.02311 appendix B).

    Args:
        strategy: how the model is trained.
        workload: the model.
        cluster: the devices.
        iteration_time_s: seconds of one iteration.
        precision: `bf16`, `fp16` or `fp32`.
    """
    nodes = [node for node in cluster.nodes for _ in range(node.num_devices)]
    places = strategy.placement or range(strategy.world_size)
    peak = sum(nodes[place].device.peak_flops(precision) for place in places if place < len(nodes))
    return model_flops(workload) * sequences(strategy) / (iteration_time_s * peak) if peak else 0.0


def time_text(seconds: float) -> str:
    """Return seconds as text with three significant digits."""
    for scale, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        # From 999.5 ms on, three digits say 1 s.
        if seconds * scale >= 0.9995 or unit == "us":
            return f"{seconds * scale:.3g} {unit}" if seconds * scale < 1000 else f"{seconds * scale:,.0f} {unit}"
    raise AssertionError


def interval_text(prediction: Prediction) -> str:
    """Return how far the time may be off, as `-4 +6 %`; empty if the prediction has no interval."""
    if prediction.interval_s is None or not prediction.iteration_time_s:
        return ""
    low, high = (100 * (bound / prediction.iteration_time_s - 1) for bound in prediction.interval_s)
    return f"{low:+.0f} {high:+.0f} %"


def bytes_text(num_bytes: float) -> str:
    """Return bytes as text, in units of powers of 1000, as data sheets count them."""
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if num_bytes >= 0.9995 * scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes / 1e3:.3g} kB"


def count_text(number: float) -> str:
    """Return a large number as short text: `12.9 B`."""
    for scale, unit in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        # From 999.5 M on, three digits say 1 B.
        if number >= 0.9995 * scale:
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
