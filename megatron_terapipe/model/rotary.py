"""Rotary position embedding (Su et al., RoFormer, arXiv 2104.09864), in the form that rotates halves."""

import torch
from torch import Tensor

from deepspeed_ext.pointwise import Pointwise


class RotaryTable:
    """Cosines and sines of all positions: channel c turns with channel c + R/2, by position * base^(-2c/R).

    All layers of a rank share one table. It is computed on the device that uses it, when it is first used, and again
    only if positions, device or type ask for another.

    Args:
        channels: channels R of each head that turn, the first ones.
        base: base of the wavelengths.
        length: positions 0 .. length that the table has from the start.
    """

    def __init__(self, channels: int, base: float, length: int) -> None:
        self._channels, self._base, self._length = channels, base, length
        self._table: Tensor | None = None

    def between(self, start: int, end: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [1, N, 1, R/2] of the positions start .. end: views.

        Args:
            start: first position.
            end: position after the last.
            like: gives the type, at least fp32, and the device.
        """
        cosine, sine = self._reaching(end, like)[:, None, start:end, None].unbind()
        return cosine, sine

    def at(self, positions: Tensor, end: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, N, 1, R/2] of positions [B, N], all below `end`.

        Args:
            positions: on the device of `like`.
            end: position after the last that there can be: the host does not look at the tensor.
            like: gives the type, at least fp32, and the device.
        """
        cosine, sine = self._reaching(end, like)[:, positions].unsqueeze(3).unbind()
        return cosine, sine

    def _reaching(self, end: int, like: Tensor) -> Tensor:
        """Cosines, then sines: [2, T, R/2] of at least `end` positions."""
        table, dtype = self._table, torch.promote_types(like.dtype, torch.float32)
        if table is None or table.shape[1] < end or table.dtype != dtype or table.device != like.device:
            # Evaluation may come first, and a tensor of inference mode could not be kept for a backward.
            with torch.inference_mode(False), torch.no_grad():
                table = self._table = self._computed(max(end, self._length), dtype, like.device)
        return table

    def _computed(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        # In fp64: in fp32 a position of 100,000 would be off by a hundredth of a turn.
        pairs = torch.arange(0, self._channels, 2, dtype=torch.float64, device=device)
        positions = torch.arange(length, dtype=torch.float64, device=device)
        angles = positions.unsqueeze(-1) * self._base ** (-pairs / self._channels)
        return torch.stack((angles.cos(), angles.sin())).to(dtype)


def rotated_heads(groups: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a product, queries and keys rotated.

    Args:
        groups: [B, N, G, H/G + 2, D]: of each key head its query heads, then it, then its value head.
        cosine: [1 or B, N, 1, R/2].
        sine: of the same shape.

    Returns:
        Queries [B, N, H, D]; keys and values [B, N, G, D]. The values are a view of the product.
    """
    return _Rotate.apply(groups, cosine, sine)


class _Rotate(torch.autograd.Function):
    """A rotation's gradient turns back, so nothing of the input is kept."""

    @staticmethod
    def forward(ctx, groups, cosine, sine):
        ctx.save_for_backward(cosine, sine)
        return *_turned(groups, cosine, sine), groups[..., -1, :]

    @staticmethod
    def backward(ctx, of_query, of_key, of_value):
        return _turned_back(of_query, of_key, of_value, *ctx.saved_tensors), None, None


@Pointwise
def _turned(groups: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    """Queries [B, N, H, D] and keys [B, N, G, D], turned."""
    query, key = groups[..., :-2, :].flatten(2, 3), groups[..., -2, :]
    return _turn(query, cosine, sine), _turn(key, cosine, sine)


@Pointwise
def _turned_back(of_query: Tensor, of_key: Tensor, of_value: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """The gradient of the product [B, N, G, H/G + 2, D]."""
    of_query, of_key = _turn(of_query, cosine, -sine), _turn(of_key, cosine, -sine)
    of_query = of_query.unflatten(2, (of_key.shape[2], -1))
    return torch.cat((of_query, of_key.unsqueeze(3), of_value.unsqueeze(3)), dim=3)


def _turn(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    half = cosine.shape[-1]
    first, second, rest = heads.split([half, half, heads.shape[-1] - 2 * half], dim=-1)
    turned = first * cosine - second * sine, second * cosine + first * sine
    return torch.cat((*(each.to(heads.dtype) for each in turned), rest), dim=-1)
