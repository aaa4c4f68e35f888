"""Bytes of weights, gradients and optimizer state of one parameter, as trainers keep them.

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

from megatron_terapipe.config.deepspeed import BUCKET_ELEMENTS

ScalarOrArray = NDArray[np.float64] | float

_BUCKETS = {"terapipe": BUCKET_ELEMENTS, "megatron": 500_000_000}
"""Elements of ZeRO's buckets, one to reduce and one to gather, of this trainer and by DeepSpeed's default. A model with
fewer parameters on a rank has smaller ones."""


class StateBytes(NamedTuple):
    """Bytes of one parameter on a rank; arguments that were arrays make arrays.

    Attributes:
        weights: what products read.
        gradients: sums over micro-batches.
        optimizer: copies in fp32, and moments.
        step: more while the optimizer steps; by then no activations are held.
    """

    weights: float
    gradients: float
    optimizer: ScalarOrArray
    step: ScalarOrArray


def state_bytes(software: str, precision: str, *, zero_stage: int, data_parallel_size: ScalarOrArray) -> StateBytes:
    """Bytes of one parameter, an array as `data_parallel_size` [...] is.

    Args:
        software: name of the trainer.
        precision: `fp16`, `bf16` or `fp32`.
        zero_stage: 0 or 1.
        data_parallel_size: ranks that share the optimizer state under ZeRO 1.
    """
    share = 1.0 / data_parallel_size
    if precision == "fp32":
        return StateBytes(4, 4, 12 * share, 4 * share) if zero_stage else StateBytes(4, 4, 8.0, 0.0)
    if software == "terapipe":
        if precision == "bf16":
            return StateBytes(2, 4, 12 * share, 0.0) if zero_stage else StateBytes(2, 2, 12 * share, 4 * share)
        return StateBytes(2, 2, 12 * share, 4 * share) if zero_stage else StateBytes(2, 2, 12.0, 8.0)
    if zero_stage:
        return StateBytes(2, 2, 12 * share, 4 * share) if precision == "fp16" else StateBytes(2, 6, 12 * share, 0.0)
    return StateBytes(2, 4, 12.0, 0.0)


def bucket_bytes(software: str, precision: str, parameters: ScalarOrArray, zero_stage: int) -> ScalarOrArray:
    """Bytes of the two buckets in which ZeRO 1 reduces gradients and gathers weights; 0 without it.

    Args:
        software: name of the trainer.
        precision: `fp32`, `fp16` or `bf16`.
        parameters: parameters of a rank, a number or an array of any shape [...].
        zero_stage: ZeRO stage.
    """
    if not zero_stage:
        return 0.0 * parameters
    element = 4 if precision == "fp32" or (software == "terapipe" and precision == "bf16") else 2
    return 2 * element * np.minimum(parameters, _BUCKETS[software])
