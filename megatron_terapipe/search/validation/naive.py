"""The line that every model must beat: 45 % of the peak and the bubble of 1F1B; 16 bytes a parameter."""

from megatron_terapipe.search.trials.trial import Trial

UTILIZATION = 0.45
"""Share of the peak, as an experienced user would guess it for A100s."""

BYTES_PER_PARAMETER = 16
"""Weights, gradients and optimizer state in half precision (ZeRO, arXiv 1910.02054 section 3.1)."""


def naive_time_s(trial: Trial) -> float:
    """Seconds of an iteration: FLOPs of all layers, recomputation included, over 45 % of the peak of all devices.

    The bubble is (P - 1) / (V M) of that (arXiv 2104.04473 section 2.2).
    """
    strategy, workload = trial.strategy, trial.workload
    passes = 4 if strategy.recompute == "full" else 3
    flops = 0.0
    for layer in workload.layers:
        # Tables count every token as if it attended to the whole sequence.
        attention = layer.attention.flops_per_position * layer.tokens if layer.attention is not None else 0
        forward = layer.tokens * (layer.linear_flops_per_token + attention)
        flops += forward * (passes if layer.kind in ("block", "other") else 3)
    sequences = strategy.num_micro_batches * strategy.micro_batch_size * strategy.data_parallel_size
    devices = [node.device for node in trial.cluster.nodes]
    peak = min(device.peak_flops(trial.precision) for device in devices)
    busy = sequences * flops / (strategy.world_size * UTILIZATION * peak)
    waiting = (strategy.pipeline_parallel_size - 1) / (strategy.num_model_chunks * strategy.num_micro_batches)
    return busy * (1 + waiting)


def naive_memory_bytes(trial: Trial) -> float:
    """Bytes of a device: 16 for each of its parameters."""
    shared = trial.strategy.tensor_parallel_size * trial.strategy.pipeline_parallel_size
    return BYTES_PER_PARAMETER * trial.workload.parameters / shared
