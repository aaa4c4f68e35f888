"""Tensors of one rank alone against the parts of them that several ranks have."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_terapipe.model.tensor_parallel import TensorParallelRanks

ALONE = TensorParallelRanks()


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The same numbers on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def part_of(whole: Tensor, parameter: nn.Parameter, ranks: TensorParallelRanks) -> Tensor:
    """The part of a tensor of the whole weight's shape that belongs to a rank's parameter."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    step = whole.shape[parameter.partition_dim] // ranks.size
    return whole.narrow(parameter.partition_dim, ranks.rank * step, step)


def tokens_of(whole: Tensor, ranks: TensorParallelRanks) -> Tensor:
    """Of [B, N, ...], what a rank has between the matrices."""
    if not ranks.sequence_parallel:
        return whole
    step = whole.shape[1] // ranks.size
    return whole.narrow(1, ranks.rank * step, step)


def fill(whole: nn.Module, part: nn.Module, ranks: TensorParallelRanks) -> None:
    """Give both the same numbers of order 1, which no initializer would."""
    for seed, (one, other) in enumerate(zip(whole.parameters(), part.parameters(), strict=True)):
        scale = one.shape[-1] ** -0.5 if one.dim() > 1 else 0.5
        one.data = drawn(*one.shape, seed=100 + seed) * scale
        other.data = part_of(one.data, other, ranks).clone()


def complete_gradients(module: nn.Module, ranks: TensorParallelRanks) -> dict[str, Tensor]:
    """Gradients by name; those of weights that each rank applied to its own tokens summed, as training does."""
    gradients = {}
    for name, parameter in module.named_parameters():
        gradients[name] = parameter.grad.clone()
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(gradients[name])
    return gradients


def assert_gradients(found: dict[str, Tensor], part: nn.Module, whole: nn.Module, ranks: TensorParallelRanks) -> None:
    for (name, parameter), one in zip(part.named_parameters(), whole.parameters(), strict=True):
        expected = part_of(one.grad, parameter, ranks)
        torch.testing.assert_close(
            found[name],
            expected,
            rtol=1e-12,
            atol=1e-12 * one.grad.abs().max().item(),
            msg=lambda text, name=name: f"{name}: {text}",
        )
