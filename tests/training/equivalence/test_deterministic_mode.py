"""`--deterministic-mode`: torch is deterministic, and two runs agree to the bit. Products never sum in bf16 or fp16."""

import torch

from megatron_terapipe.training.build_engine import build_engine
from tests.distributed import run_distributed
from tests.training.gpt_runs import Setup, batches, run_of

SETUP = Setup(
    2,
    "--deterministic-mode --pipeline-model-parallel-size 2 --num-token-slices 4 --zero-stage 1 --hidden-dropout 0.1"
    " --reset-position-ids --reset-attention-mask",
)


def trained(setup: Setup) -> tuple[tuple[bool, ...], float, list[torch.Tensor]]:
    """Settings of torch, the second loss, and the weights after it."""
    engine = build_engine(run_of(setup))
    losses = [engine.train_batch(iter(batches(setup, 0))).item() for _ in range(2)]
    weights = [each.detach().clone() for each in engine.module.parameters()]
    products = torch.backends.cuda.matmul
    rounded = products.allow_bf16_reduced_precision_reduction, products.allow_fp16_reduced_precision_reduction
    return (torch.are_deterministic_algorithms_enabled(), *rounded), losses[-1], weights


def test_two_runs_agree_to_the_bit() -> None:
    first, second = (run_distributed(trained, 2, SETUP) for _ in range(2))
    for (settings, loss, weights), (_, other_loss, other_weights) in zip(first, second, strict=True):
        assert settings == (True, False, False)
        assert loss == other_loss
        assert all(map(torch.equal, weights, other_weights))
