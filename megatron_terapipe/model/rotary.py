"""Rotary position embedding (Su et al., RoFormer, arXiv 2104.09864)."""

import torch
from torch import Tensor

from deepspeed_ext.pointwise import Pointwise
from deepspeed_ext.runtime.state.sequence_state import Past
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.config.layers import BlockShape
from megatron_terapipe.config.rotation import Rotation, rotation_of

WHOLE_TABLE_BYTES = 1 << 26
"""Largest table that is computed once for all positions: 131,072 of them in fp32, at 128 channels that turn."""

ANGLES_AT_ONCE = 1 << 20
"""Angles in fp64 that exist at once: 16,384 positions at 128 channels that turn."""


class RotaryTable:
    """Cosines and sines of positions, for R channels of each head, the first ones, that turn in pairs.

    All layers of a rank that turn alike share one table. It is computed on the device that uses it, when it is first
    used, and again only for other positions, another device or type. Where a table of all positions would be large,
    only the positions of a token slice are computed, once for its layers (`Past.cached_for_slice`).

    Args:
        length: positions 0 .. length that the table has from the start.
    """

    def __init__(self, rotation: Rotation, length: int) -> None:
        self.rotation, self._length = rotation, length
        self._table: Tensor | None = None
        self._frequencies: Tensor | None = None

    def of_token_slice(self, past: Past, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [1 or B, N, 1, R/2] for the tokens [B, N, ...] that a layer is given."""
        end = past.prefix_len + like.shape[1]

        def looked_up() -> tuple[Tensor, Tensor]:
            if past.positions_restart:
                return self.at(past.positions(like.shape[1], like.device), end, like)
            return self.between(past.prefix_len, end, like)

        return past.cached_for_slice(self.rotation.name, looked_up)

    def of_queries(self, query: Tensor, past: Past) -> Tensor:
        """Return queries [B, N, H, D], multiplied by the factors of their positions."""
        beta, length = self.rotation.query_scaling
        if not beta:
            return query

        def factors() -> Tensor:
            positions = past.positions(query.shape[1], query.device)
            return (1 + beta * torch.log1p((positions // length).double()))[..., None, None].to(query.dtype)

        return query * past.cached_for_slice("factors of queries", factors)

    def between(self, start: int, end: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [1, N, 1, R/2] of the positions start .. end: views.

        Args:
            like: gives the type, at least fp32, and the device.
        """
        if self._is_large(end, like):
            # Positions are consecutive, so no tensor is copied to the device.
            turns = self._computed(torch.arange(start, end, dtype=torch.float64, device=like.device), like)
        else:
            turns = self._reaching(end, like)[:, start:end]
        cosine, sine = turns[:, None, :, None].unbind()
        return cosine, sine

    def at(self, positions: Tensor, end: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, N, 1, R/2] of positions [B, N], all below `end`.

        Args:
            end: position after the last that there can be: the host does not look at the tensor.
            like: gives the type, at least fp32, and the device.
        """
        large = self._is_large(end, like)
        turns = self._computed(positions.double(), like) if large else self._reaching(end, like)[:, positions]
        cosine, sine = turns.unsqueeze(3).unbind()
        return cosine, sine

    def _is_large(self, end: int, like: Tensor) -> bool:
        """Whether a table of all positions would take more memory than it saves time."""
        positions = max(end, self._length)
        return positions * 2 * len(self.rotation.frequencies) * _dtype_of(like).itemsize > WHOLE_TABLE_BYTES

    def _reaching(self, end: int, like: Tensor) -> Tensor:
        """Cosines, then sines: [2, T, R/2] of at least `end` positions."""
        table = self._table
        if table is None or table.shape[1] < end or table.dtype != _dtype_of(like) or table.device != like.device:
            positions = torch.arange(max(end, self._length), dtype=torch.float64, device=like.device)
            table = self._table = self._computed(positions, like)
        return table

    def _computed(self, positions: Tensor, like: Tensor) -> Tensor:
        """Cosines, then sines: [2, ..., R/2] of positions [...] in fp64.

        With angles in fp32 cosines are off by 0.008 at position 2^17, by 0.06 at 2^20 and by 1 at 2^24, because 24 bits
        of an angle leave few for the part of a turn. In fp64 they are off by 2e-9 at most, which fp32 does not show.
        """
        # Evaluation may come first, and a tensor of inference mode could not be kept for a backward.
        with torch.inference_mode(False), torch.no_grad():
            frequencies = self._frequencies_beside(positions)
            table = positions.new_empty((2, *positions.shape, len(frequencies)), dtype=_dtype_of(like))
            tokens = max(ANGLES_AT_ONCE // len(frequencies), 1)
            parts = zip(positions.flatten().split(tokens), table.flatten(1, -2).split(tokens, dim=1), strict=True)
            for part, (cosine, sine) in parts:
                angles = part[:, None] * frequencies
                for function, turned in ((torch.cos, cosine), (torch.sin, sine)):
                    turned.copy_(function(angles).mul_(self.rotation.factor))
        return table

    def _frequencies_beside(self, positions: Tensor) -> Tensor:
        """The frequencies [R/2] in fp64, made once on a device.

        They are arguments of kernels: a tensor made of a list would be copied, and waited for.
        """
        if self._frequencies is None or self._frequencies.device != positions.device:
            self._frequencies = torch.stack([positions.new_full((), each) for each in self.rotation.frequencies])
        return self._frequencies


def rotary_table(model: ModelConfig, block: BlockShape) -> RotaryTable | None:
    """Return the rotations of a layer's positions; None if they are not rotary."""
    rotation = rotation_of(model, block)
    return None if rotation is None else RotaryTable(rotation, model.seq_length)


def _dtype_of(like: Tensor) -> torch.dtype:
    """Type of a table for heads of a type: at least fp32."""
    return torch.promote_types(like.dtype, torch.float32)


def rotated_heads(
    groups: Tensor,
    cosine: Tensor | None,
    sine: Tensor | None,
    *,
    interleaved: bool = False,
    room: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a product, queries and keys rotated.

    Args:
        groups: [B, N, G, H/G + 2, D]: of each key head its query heads, then it, then its value head.
        cosine: [1 or B, N, 1, R/2]; None if they are not rotated, which takes room.
        interleaved: whether pairs of channels are neighbours; otherwise they are R/2 apart.
        room: tensors [B, N, G, D] that keys and values are written to, in the same pass; None for none.

    Returns:
        Queries [B, N, H, D]; keys and values [B, N, G, D]. Without room, the values are a view of the product.
    """
    return _RotateProduct.apply(groups, cosine, sine, interleaved, room)


def rotated(heads: Tensor, cosine: Tensor, sine: Tensor, *, interleaved: bool = False, after: int = 0) -> Tensor:
    """Return heads [B, N, H, D], rotated.

    Args:
        cosine: [1 or B, N, 1, R/2].
        interleaved: whether pairs of channels are neighbours; otherwise they are R/2 apart.
        after: channels of a head before those that turn.
    """
    return _Rotate.apply(heads, cosine, sine, interleaved, after)


def writes_heads(device: torch.device) -> bool:
    """Whether `rotated_heads` writes keys and values in the pass of the rotation."""
    return _turned_product.is_compiled_on(device)


class _RotateProduct(torch.autograd.Function):
    """The gradient is the inverse rotation, so no input is kept."""

    @staticmethod
    def forward(ctx, groups, cosine, sine, interleaved: bool, room: tuple[Tensor, Tensor] | None):
        ctx.save_for_backward(cosine, sine)
        ctx.interleaved = interleaved
        query, key = _turned_product(groups, cosine, sine, interleaved, *(room or ()))
        return query, *(room or (key, groups[..., -1, :]))

    @staticmethod
    def backward(ctx, of_query, of_key, of_value):
        return _product_turned_back(of_query, of_key, of_value, *ctx.saved_tensors, ctx.interleaved), *[None] * 4


class _Rotate(torch.autograd.Function):
    """Rotation of heads that are no longer a part of the product; its gradient turns back."""

    @staticmethod
    def forward(ctx, heads, cosine, sine, interleaved: bool, after: int):
        ctx.save_for_backward(cosine, sine)
        ctx.interleaved, ctx.after = interleaved, after
        return _turned(heads, cosine, sine, interleaved, after, False)

    @staticmethod
    def backward(ctx, of_heads):
        return _turned(of_heads, *ctx.saved_tensors, ctx.interleaved, ctx.after, True), *[None] * 4


@Pointwise
def _turned_product(
    groups: Tensor, cosine: Tensor | None, sine: Tensor | None, interleaved: bool, *room: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Queries [B, N, H, D] and keys [B, N, G, D], turned; keys and values are in the room instead, if there is one."""
    query, key = groups[..., :-2, :].flatten(2, 3), groups[..., -2, :]
    if cosine is not None:
        query, key = (_turn(each, cosine, sine, interleaved) for each in (query, key))
    if not room:
        return query, key
    copied = key, groups[..., -1, :]
    if not torch.compiler.is_compiling():
        for place, heads in zip(room, copied, strict=True):
            place.copy_(heads)
        return query.contiguous(), None
    # The compiler makes one kernel of a list, whatever the sizes.
    turned = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    torch._foreach_copy_([turned, *room], [query, *copied])
    return turned, None


@Pointwise
def _product_turned_back(
    of_query: Tensor, of_key: Tensor, of_value: Tensor, cosine: Tensor | None, sine: Tensor | None, interleaved: bool
) -> Tensor:
    """The gradient of the product [B, N, G, H/G + 2, D]."""
    if cosine is not None:
        of_query, of_key = (_turn(each, cosine, -sine, interleaved) for each in (of_query, of_key))
    of_query = of_query.unflatten(2, (of_key.shape[2], -1))
    return torch.cat((of_query, of_key.unsqueeze(3), of_value.unsqueeze(3)), dim=3)


@Pointwise
def _turned(heads: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool, after: int, back: bool) -> Tensor:
    """Heads [B, N, H, D], turned, or turned back."""
    return _turn(heads, cosine, -sine if back else sine, interleaved, after)


def _turn(heads: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool, after: int = 0) -> Tensor:
    half = cosine.shape[-1]
    before, turning, rest = heads.tensor_split((after, after + 2 * half), dim=-1)
    first, second = (turning[..., 0::2], turning[..., 1::2]) if interleaved else turning.split(half, dim=-1)
    turned = [each.to(heads.dtype) for each in (first * cosine - second * sine, second * cosine + first * sine)]
    if interleaved:
        turned = [torch.stack(turned, dim=-1).flatten(-2)]
    return torch.cat((before, *turned, rest), dim=-1)
