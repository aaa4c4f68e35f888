"""What a run says of attention before it begins."""

import torch

from megatron_terapipe.arguments import parse_arguments
from megatron_terapipe.training.trainer import attention_notes

REQUIRED = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --vocab-size 257 --micro-batch-size 2 "
    "--train-iters 10 --lr 1e-3 --data-path corpus "
)


def test_a_device_is_told_of_what_slows_it_down() -> None:
    slow = parse_arguments((REQUIRED + "--attention-dropout 0.1").split())
    capped = parse_arguments((REQUIRED + "--bf16 --attention-softcap 50").split())
    fast = parse_arguments((REQUIRED + "--bf16 --attention-dropout 0").split())
    cuda = torch.device("cuda")
    dtype, dropout = attention_notes(slow, cuda, flash_attention_3=False)
    assert "--bf16" in dtype
    assert "--attention-dropout 0" in dropout
    (softcap,) = attention_notes(capped, cuda, flash_attention_3=False)
    assert "--attention-softcap 50" in softcap
    assert attention_notes(fast, cuda, flash_attention_3=True) == [" attention by FlashAttention-3"]
    assert attention_notes(slow, torch.device("cpu"), flash_attention_3=False) == []
