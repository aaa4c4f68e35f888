"""A hash of tensors, computed where they lie."""

from collections.abc import Sequence

import torch
from torch import Tensor

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""Words by bytes of an element. They are far smaller than the modulus, which keeps their highest bits apart."""

_PIECE = 1 << 20
"""Words that are hashed at a time, so that the copy of them in 64 bits stays small."""

_GOLDEN = -7046029254386353131
"""2^64 over the golden ratio, as a signed number: multiples of it are spread evenly over all 64 bits."""


def hashes(tensors: Sequence[Tensor]) -> Tensor:
    """Hash of the bits of each tensor: [tensors], on their device.

    The words of the tensor are multiplied by odd numbers and added up modulo 2^64, as in the multilinear
    hashing of Dietzfelbinger (STACS 1996). A product with an odd number is 0 only if the other factor is: two tensors
    that differ in one word always have two hashes.
    """
    device = tensors[0].device
    longest = max(each.nbytes // min(each.element_size(), 4) for each in tensors)
    factors = torch.arange(min(_PIECE, longest), dtype=torch.int64, device=device)
    factors.mul_(_GOLDEN).bitwise_or_(1)
    return torch.stack([_hash(each, factors) for each in tensors])


def _hash(tensor: Tensor, factors: Tensor) -> Tensor:
    words = tensor.detach().contiguous().view(-1).view(_WORDS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for piece in words.split(_PIECE):
        total = total * (_GOLDEN | 1) + (piece * factors[: piece.numel()]).sum()
    return total
