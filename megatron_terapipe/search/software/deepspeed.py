"""DeepSpeed's pipeline engine with the layers of Megatron-LM: Megatron-DeepSpeed, as most published runs used it.

Sources: `runtime/pipe/engine.py`, `runtime/zero/stage_1_and_2.py` and `runtime/bf16_optimizer.py` of DeepSpeed 0.19.8.
"""

from dataclasses import replace

from megatron_terapipe.search.software.megatron_lm import MEGATRON_LM

DEEPSPEED = replace(
    MEGATRON_LM,
    name="deepspeed",
    title="DeepSpeed's pipeline engine with Megatron's layers",
    runs=(("schedule", ("1f1b",)), ("num_token_slices", (1,)), ("stage_partition", ("uniform", "parameters"))),
)
