"""What of a strategy waits in the memory of hosts: its bytes, how fast devices copy them, and when (ADR 50)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from deepspeed_ext.plan.programs.host_copies import HostCopy, HostCopySettings
from megatron_terapipe.search.cost.layer_counts import LayerCounts
from megatron_terapipe.search.cost.placed_strategy import PlacedStrategy
from megatron_terapipe.search.inputs.cluster import Cluster
from megatron_terapipe.search.inputs.layer import Layer
from megatron_terapipe.search.inputs.workload import Workload
from megatron_terapipe.search.op_times.hardware_efficiency import HardwareEfficiency
from megatron_terapipe.search.op_times.layer_times import key_heads

Floats = NDArray[np.float64]

SUMS_BYTES = 4 + 4 + 8
"""Of a token between two stages of the vocabulary: two sums in fp32, and the label."""

SHARE_OF_HOST = 0.8
"""Of the memory of a host, for copies; the rest is for data, checkpoints on their way, and the system."""


def stage_input_elements(workload: Workload, counts: LayerCounts) -> Floats:
    """Return the numbers of one token in the input of each stage, before ranks share it: [stages].

    Args:
        counts: layers of each stage; the first one reads tokens, which are few bytes.
    """
    before = [workload.layers[index].output_elements for index in counts.last_layers]
    return np.array([0.0, *before]) / workload.seq_length


def host_copy_settings(
    placed: PlacedStrategy,
    workload: Workload,
    kinds: Sequence[Layer],
    cluster: Cluster,
    *,
    element_bytes: int,
    efficiency: HardwareEfficiency,
) -> HostCopySettings:
    """Return what may wait on the hosts, for timelines in seconds.

    Args:
        element_bytes: bytes of an activation.
    """
    strategy, counts, seq_length = placed.strategy, placed.counts, workload.seq_length
    of_kinds = np.array([_key_value_elements(layer, placed) * layer.tokens / seq_length for layer in kinds])
    sequences = strategy.micro_batch_size / strategy.sequence_parallel_size
    inputs = element_bytes * stage_input_elements(workload, counts) * strategy.micro_batch_size / strategy.granularity
    if strategy.vocabulary_stages:
        inputs[len(inputs) - strategy.pipeline_parallel_size + 1 :] += sequences * SUMS_BYTES
    nodes = cluster.nodes
    bandwidth = efficiency.host_efficiency * min(node.host.bandwidth for node in nodes)
    return HostCopySettings(
        lengths=strategy.cut(seq_length).lengths,
        input_bytes=tuple(inputs.tolist()),
        key_value_bytes=tuple((element_bytes * sequences * (counts.per_stage @ of_kinds)).tolist()),
        to_host=bandwidth,
        from_host=bandwidth,
        host_bytes=SHARE_OF_HOST * min(node.host.memory_bytes / node.num_devices for node in nodes),
        windows=tuple(_widest_window(kinds, row) for row in counts.per_stage),
    )


def host_bytes(copies: tuple[HostCopy, ...]) -> float:
    """Return the most bytes that the copies of a rank take of its host at a time."""
    changes = sorted(change for copy in copies for change in ((copy.offload, copy.size), (copy.reader, -copy.size)))
    return float(max(np.cumsum([size for _, size in changes]), default=0.0))


def _key_value_elements(layer: Layer, placed: PlacedStrategy) -> float:
    """Numbers of the keys and values of a token, on a rank whose part counts as all tokens of a part of sequences."""
    if layer.attention is None:
        return 0.0
    layout = placed.strategy.layout
    heads = key_heads(layer.attention, layout.tensor_parallel_size * layout.sequence_parallel_size)
    return float(2 * heads * layer.attention.head_size / layout.tensor_parallel_size)


def _widest_window(kinds: Sequence[Layer], counts: Floats) -> int | None:
    """The widest sliding window of a stage with [K] layers; None where one attends to all tokens before it."""
    here = [layer.attention for layer, count in zip(kinds, counts, strict=True) if count]
    windows = [attention.sliding_window for attention in here if attention is not None]
    return None if None in windows else max((window for window in windows if window is not None), default=None)
