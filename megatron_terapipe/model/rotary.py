"""Rotary position embedding (Su et al., RoFormer, arXiv 2104.09864), in the form that rotates halves."""

import torch
from torch import Tensor


class Rotation:
    """The rotations of one token slice's positions: channel c turns with channel c + R/2, by position * base^(-2c/R).

    Args:
        positions: [1, N] or [B, N].
        channels: channels R of each head that turn, the first ones.
        base: of the wavelengths.
        like: gives the type and the device.
    """

    def __init__(self, positions: Tensor, channels: int, base: float, like: Tensor) -> None:
        # In fp64: in fp32 a position of 100,000 would be off by a hundredth of a turn.
        frequencies = base ** (-torch.arange(0, channels, 2, dtype=torch.float64, device=like.device) / channels)
        angles = positions.to(like.device, torch.float64).unsqueeze(-1) * frequencies
        dtype = torch.promote_types(like.dtype, torch.float32)
        self.cosine, self.sine = (each.to(dtype).unsqueeze(2) for each in (angles.cos(), angles.sin()))

    def __call__(self, heads: Tensor) -> Tensor:
        """Rotate queries or keys [B, N, H, D]."""
        return _Rotate.apply(heads, self.cosine, self.sine)


class _Rotate(torch.autograd.Function):
    """A rotation's gradient turns back, so nothing of the input is kept."""

    @staticmethod
    def forward(ctx, heads, cosine, sine):
        ctx.save_for_backward(cosine, sine)
        return _rotated(heads, cosine, sine)

    @staticmethod
    def backward(ctx, output_gradient):
        cosine, sine = ctx.saved_tensors
        return _rotated(output_gradient, cosine, -sine), None, None


def _rotated(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    half = cosine.shape[-1]
    first, second, rest = heads.split([half, half, heads.shape[-1] - 2 * half], dim=-1)
    rotated = torch.empty_like(heads, memory_format=torch.contiguous_format)
    rotated[..., :half] = first * cosine - second * sine
    rotated[..., half : 2 * half] = second * cosine + first * sine
    rotated[..., 2 * half :] = rest
    return rotated
