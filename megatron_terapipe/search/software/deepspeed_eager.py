"""DeepSpeed's pipeline engine with layers written in plain PyTorch, tensor-parallel ones of Megatron-DeepSpeed.

OPT and GPT-Neo are written so in Sailor (github.com/eth-easl/sailor, third_party/Megatron-DeepSpeed/megatron/model/
gpt_neo_model.py), with products of scores, a softmax in fp32, LayerNorm, GELU and dropout as PyTorch has them. Bytes of
eager operators were counted as PyTorch 2.13 dispatches them.

Scores and the optimizer's step take longer than counted bytes, so theirs are those that explain what the authors
measured of one layer on one GPU (sailor/Planner/sailor_planner/profiles/GPT-Neo-2.7/GH-96/profile.json): 16 sequences
on one rank take 36.5 ms forward and 97.8 ms backward, the step of its 79 million parameters 2.9 ms.
"""

from dataclasses import replace

from megatron_terapipe.search.software.deepspeed import DEEPSPEED
from megatron_terapipe.search.software.description import Operator

DEEPSPEED_EAGER = replace(
    DEEPSPEED,
    name="deepspeed-eager",
    title="DeepSpeed's pipeline engine with layers in plain PyTorch",
    operators=replace(
        DEEPSPEED.operators,
        layernorm=Operator(forward=2, backward=5, backward_kernels=2),
        # Dropout with a mask of one byte, and the sum; back the same, and the sum of both branches' gradients.
        residual=Operator(
            forward=5, backward=5, forward_bytes=1, backward_bytes=1, forward_kernels=2, backward_kernels=2
        ),
        # The bias of the product before is added on its own.
        activation=Operator(forward=4, backward=4, forward_kernels=2, backward_kernels=2),
        gated_activation=Operator(forward=7, backward=10, forward_kernels=3, backward_kernels=4),
    ),
    attention=replace(
        DEEPSPEED.attention,
        # Counted are 29 and 49: written by the product (2), masked (5), cast to fp32 (6), softmax (8), cast back (6),
        # read by the product with the values (2); back each of them, the softmax from two tensors.
        score_bytes=42,
        score_bytes_backward=129,
        forward_kernels=10,
        backward_kernels=18,
    ),
    # A fused step reads and writes 18.
    step_bytes=74,
)
