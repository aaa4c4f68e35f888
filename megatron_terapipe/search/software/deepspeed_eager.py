"""DeepSpeed's pipeline engine with layers written in plain PyTorch, tensor-parallel ones of Megatron-DeepSpeed.

OPT and GPT-Neo are written so in Sailor (github.com/eth-easl/sailor, third_party/Megatron-DeepSpeed/megatron/model/
gpt_neo_model.py), with products of scores, a softmax in fp32, LayerNorm, GELU and dropout as PyTorch has them. Bytes of
eager operators were counted as PyTorch 2.13 dispatches them.
"""

from dataclasses import replace

from megatron_terapipe.search.software.deepspeed import DEEPSPEED
from megatron_terapipe.search.software.description import Operator

DEEPSPEED_EAGER = replace(
    DEEPSPEED,
    name="deepspeed-eager",
    title="DeepSpeed's pipeline engine with layers in plain PyTorch",
    step_bytes=74,
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
        # Written by the product (2), scaled and masked (5), cast to fp32 (2 + 4), softmax (8), cast back (4 + 2), read
        # by the product with the values (2).
        score_bytes=42,
        score_bytes_backward=129,
        forward_kernels=10,
        backward_kernels=18,
    ),
)
