"""DeepSpeed's pipeline engine with the layers of Megatron-LM: Megatron-DeepSpeed, as most published runs used it.

Sources: `runtime/pipe/engine.py`, `runtime/pipe/schedule.py`, `runtime/zero/stage_1_and_2.py` and
`runtime/bf16_optimizer.py` of DeepSpeed 0.19.8. Gradients travel as its optimizers send them: sums of bf16 in fp32, and
all-reduced even at ZeRO stage 1 (`cost.step_costs.step_traffic`). GPT-NeoX's rotation is written in Python.
"""

from dataclasses import replace

from megatron_terapipe.search.software.description import OURS_ALONE, Operator
from megatron_terapipe.search.software.megatron_lm import MEGATRON_LM

DEEPSPEED = replace(
    MEGATRON_LM,
    name="deepspeed",
    title="DeepSpeed's pipeline engine with Megatron's layers",
    operators=replace(
        MEGATRON_LM.operators,
        # Halves are swapped and put together, for queries and for keys.
        rotary=Operator(forward=10, backward=10, forward_kernels=10, backward_kernels=10),
    ),
    communication=replace(MEGATRON_LM.communication, reduction_bytes=None),
    runs=(
        *OURS_ALONE,
        ("schedule", ("1f1b",)),
        ("num_token_slices", (1,)),
        ("stage_partition", ("uniform", "parameters")),
    ),
)
