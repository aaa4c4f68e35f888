"""Seconds at the end of an iteration: reductions of gradients and of the tied embedding, and the optimizer step."""

from typing import NamedTuple

import numpy as np

from megatron_terapipe.search.cost.collectives import Span, all_gather_s, all_reduce_s, reduce_scatter_s
from megatron_terapipe.search.cost.op_times import Grid
from megatron_terapipe.search.cost.physics import Physics
from megatron_terapipe.search.software import Software


class StepCosts(NamedTuple):
    """Seconds of one pipeline rank after its last backward; numbers or arrays."""

    gradient_reduction: Grid
    shared_weight: Grid
    optimizer: Grid


def step_costs(
    parameters: Grid,
    shared_parameters: Grid,
    data_span: Span,
    ends_span: Span,
    memory_bandwidth: Grid,
    *,
    zero_stage: int,
    software: Software,
    physics: Physics,
) -> StepCosts:
    """Price the end of an iteration.

    Args:
        parameters: that a rank holds.
        shared_parameters: of them those of a weight that both ends of the pipeline hold; 0 if no two ranks share it.
        data_span: links between data-parallel ranks.
        ends_span: links between the first and the last pipeline rank.
        memory_bandwidth: of the device, bytes per second.
        zero_stage: 0: every rank steps all parameters. 1: its part, which the others gather (Rajbhandari et al., arXiv
            1910.02054 section 5.1).
        software: bytes that it reduces and keeps.
        physics: what links and memory reach.
    """
    gradients = software.reduction_bytes * parameters
    kept = software.optimizer_bytes + software.gradient_bytes + software.weight_bytes
    stepped = parameters
    if zero_stage:
        reduction = reduce_scatter_s(gradients, data_span, physics)
        reduction = reduction + all_gather_s(software.weight_bytes * parameters, data_span, physics)
        stepped = parameters / data_span.size
    else:
        reduction = all_reduce_s(gradients, data_span, physics)
    shared = np.where(
        np.greater(shared_parameters, 0),
        all_reduce_s(software.reduction_bytes * shared_parameters, ends_span, physics),
        0.0,
    )
    reached = memory_bandwidth * physics.memory_efficiency
    return StepCosts(reduction, shared, physics.optimizer_passes * kept * stepped / reached)
