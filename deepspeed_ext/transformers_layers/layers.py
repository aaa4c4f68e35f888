"""Pipeline layers around parts of a model of transformers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from deepspeed.pipe import TiedLayerSpec
from torch import Tensor, nn
from torch.nn import functional

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.runtime.gradients.weight_gradients import linear
from deepspeed_ext.runtime.sequence.sequence_state import Past
from deepspeed_ext.transformers_layers.tiled_logits import TiledLogits


@dataclass(slots=True)
class _Place:
    """The token slice that a layer computes, and the numbers of the dropouts that it still comes to."""

    past: Past
    sites: Iterator[int] = field(default_factory=lambda: count(1))


class PlacedDropout(nn.Module):
    """Dropout in the place of an `nn.Dropout`, whose masks depend on the place of each element alone."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.p = probability
        self.place: _Place | None = None
        """Where the layer that this belongs to is; None while the model runs on its own."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Zero elements of `inputs` [B, N, C], when training."""
        if not self.training or not self.p:
            return inputs
        if self.place is None:
            return functional.dropout(inputs, self.p)
        return self.place.past.dropout(inputs, self.p, site=next(self.place.sites))


class PlacedLayer(nn.Module):
    """A layer whose dropouts know the place of the token slice.

    Args:
        **parts: modules by name, each a part of the layer; dropouts in them are replaced.
    """

    def __init__(self, **parts: nn.Module | None) -> None:
        super().__init__()
        for name, part in parts.items():
            self.register_module(name, part)
        for holder in list(self.modules()):
            for name, child in list(holder.named_children()):
                if type(child) is nn.Dropout:
                    setattr(holder, name, PlacedDropout(child.p).train(child.training))
        self._dropouts = [module for module in self.modules() if isinstance(module, PlacedDropout)]

    @contextmanager
    def at(self, past: Past) -> Iterator[None]:
        """Tell the dropouts where the token slice is, while it passes."""
        place = _Place(past)
        for dropout in self._dropouts:
            dropout.place = place
        try:
            yield
        finally:
            for dropout in self._dropouts:
                dropout.place = None


class EmbeddingEnd(PlacedLayer):
    """End of the embedding: the embedding of positions is added, then dropout is applied.

    Args:
        positions: embedding of positions; None for none.
        dropout: dropout; None for none.
    """

    def __init__(self, positions: nn.Embedding | None, dropout: nn.Dropout | None) -> None:
        super().__init__(positions=positions, dropout=dropout)

    def forward(self, hidden: Tensor, past: Past) -> Tensor:
        """Return the input [B, N, C] of the first decoder layer.

        Args:
            hidden: embeddings of tokens [B, N, C].

        Raises:
            UserError: if the model has no embedding of a position.
        """
        if self.positions is not None:
            end, most = past.prefix_len + hidden.shape[1], self.positions.num_embeddings
            if end > most and not past.positions_restart:
                raise UserError(f"a sequence has {end} tokens or more, and the model {most} positions: shorten it")
            hidden = hidden + self.positions(past.positions(hidden.shape[1], hidden.device))
        if self.dropout is None:
            return hidden
        with self.at(past):
            return self.dropout(hidden)


class DecoderLayer(PlacedLayer):
    """A decoder layer of transformers.

    Args:
        rotary: gives its `position_embeddings`; None where it takes none.
        layer_type: its kind of attention, where the rotary embedding asks for one.
    """

    def __init__(self, layer: nn.Module, rotary: nn.Module | None, layer_type: str | None) -> None:
        super().__init__(layer=layer)
        # In a tuple it is no part of this module: bf16 would round its frequencies, and it has nothing to save.
        self._rotary = (rotary,)
        self._layer_type = () if layer_type is None else (layer_type,)

    def forward(self, hidden: Tensor, past: Past) -> Tensor:
        """Return the output [B, N, C] of a token slice.

        Args:
            hidden: [B, N, C].
        """
        positions = past.positions(hidden.shape[1], hidden.device)
        keywords: dict[str, Any] = {"position_ids": positions, "attention_mask": None, "past": past}
        (rotary,) = self._rotary
        if rotary is not None:
            name = f"position embeddings {self._layer_type}"
            keywords["position_embeddings"] = past.once(
                name, lambda: rotary.to(hidden.device)(hidden, positions, *self._layer_type)
            )
        with self.at(past):
            outputs = self.layer(hidden, **keywords)
        return outputs[0] if isinstance(outputs, tuple) else outputs


class TiedWords(TiedLayerSpec):
    """The embedding of tokens, there already, which the first and the last stage share.

    Args:
        forward_fn: what this layer does with it; None to embed tokens.
    """

    def __init__(self, words: nn.Module, forward_fn: Any = None) -> None:
        super().__init__("words", type(words), forward_fn=forward_fn)
        self._words = words

    def build(self, log: bool = False) -> nn.Module:
        """Return the embedding."""
        return self._words


def tied_head(
    words: nn.Embedding, hidden: Tensor, softcap: float | None = None, *, tiled: bool = False
) -> Tensor | TiledLogits:
    """Logits [B, N, V] by the weight of the embedding.

    Args:
        hidden: [B, N, C].
        softcap: limit c of the logits: x becomes c tanh(x / c); None for none.
        tiled: return what they are computed from, some tokens at a time.
    """

    def project(hidden: Tensor) -> Tensor:
        return _capped(linear(hidden, words.weight), softcap)

    return TiledLogits(hidden, project, words.num_embeddings) if tiled else project(hidden)


class Head(nn.Module):
    """The projection to logits.

    Args:
        tiled: return what logits are computed from, some tokens at a time.
    """

    def __init__(self, projection: nn.Linear, softcap: float | None, *, tiled: bool = False) -> None:
        super().__init__()
        self.projection, self._softcap, self._tiled = projection, softcap, tiled

    def forward(self, hidden: Tensor) -> Tensor | TiledLogits:
        """Return logits [B, N, V] of hidden states [B, N, C]."""
        if self._tiled:
            return TiledLogits(hidden, self._project, self.projection.out_features)
        return self._project(hidden)

    def _project(self, hidden: Tensor) -> Tensor:
        return _capped(self.projection(hidden), self._softcap)


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
