"""Bytes of weights, gradients and optimizer state of one parameter, as a trainer keeps them.

| trainer, precision, ZeRO stage | weights | gradients | optimizer | more during its step |
|---|---|---|---|---|
| fp32, 0 | 4 | 4 | 8: two moments | |
| fp32, 1 (DeepSpeedZeroOptimizer) | 4 | 4 | 12 / dp: copy and moments | 4 / dp: gradients of the own part |
| fp16, 1 (DeepSpeedZeroOptimizer) | 2 | 2 | 12 / dp | 4 / dp: the same, in fp32 |
| fp16, 0, ours (FP16_Optimizer) | 2 | 2 | 12 | 8: gradients in fp32, and again as one tensor |
| fp16 or bf16, 0, Megatron-LM (gradients added up in fp32) | 2 | 4 | 12 | |
| bf16, 1, DeepSpeed (BF16_Optimizer) | 2 | 6: of a micro-batch, and sums in fp32 | 12 / dp | |
| bf16, 1, ours (the same, but products add to the sums: docs/adr/0025) | 2 | 4 | 12 / dp | |
| bf16, 0, ours (BF16_Optimizer, sums in bf16; shards all the same) | 2 | 2 | 12 / dp | 4 / dp |

Sources: `zero/stage_1_and_2.py`, `fp16/fused_optimizer.py` and `bf16_optimizer.py` of DeepSpeed 0.19.8's `runtime`;
Adam of Kingma and Ba, arXiv 1412.6980; ZeRO, arXiv 1910.02054 section 3.1 (16 bytes a parameter).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.search.software.description import Software

ScalarOrArray = NDArray[np.float64] | float


class RankBytes(NamedTuple):
    """Bytes of one parameter on a rank; arguments that were arrays make arrays."""

    weights: ScalarOrArray
    """What products read."""
    gradients: ScalarOrArray
    """Sums over micro-batches."""
    optimizer: ScalarOrArray
    """Copies in fp32, and moments."""
    step: ScalarOrArray
    """More while the optimizer steps; by then no activations are held."""


def state_bytes(software: Software, precision: str, *, zero_stage: int, data_parallel_size: ScalarOrArray) -> RankBytes:
    """Bytes of one parameter, an array as `data_parallel_size` [...] is.

    Args:
        precision: `fp16`, `bf16` or `fp32`.
        zero_stage: 0 or 1.
    """
    each = software.state(precision, zero_stage).parameter
    return RankBytes(*(each.on_rank(name, data_parallel_size) for name in RankBytes._fields))


def bucket_bytes(software: Software, precision: str, parameters: ScalarOrArray, zero_stage: int) -> ScalarOrArray:
    """Bytes of the two buckets in which ZeRO 1 reduces gradients and gathers weights; 0 without it.

    Args:
        precision: `fp32`, `fp16` or `bf16`.
        parameters: parameters of a rank, a number or an array of any shape [...].
    """
    element = software.state(precision, zero_stage).bucket_element_bytes
    return 2 * element * np.minimum(parameters, software.bucket_elements)
