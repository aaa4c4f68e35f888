"""Pipeline layers around parts of a model of transformers: attention in token slices, tiled logits, placed dropout.

A token of Llama 3 has 128,256 logits: 770 kB with the tensors that the loss keeps, against 8 kB of hidden state.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.pipe import TiedLayerSpec
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.runtime.gradients.weight_gradients import linear
from deepspeed_ext.runtime.state.sequence_state import Past

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IGNORED = -100
"""Label of tokens that do not count."""
LOGITS_AT_ONCE = 1 << 26
"""Logits that exist together: 256 MB in fp32."""


@dataclass(frozen=True, slots=True, eq=False)
class TiledLogits:
    """Output of a head whose logits are computed for some tokens at a time."""

    hidden: Tensor
    """[B, N, C]."""
    project: Callable[[Tensor], Tensor]
    """Function from hidden states [B, n, C] to logits [B, n, V]."""
    vocabulary: int
    """Logits V of a token."""

    def compute(self) -> Tensor:
        """Return all logits: [B, N, V]."""
        return self.project(self.hidden)

    def summed_loss(self, labels: Tensor, *, at_once: int = LOGITS_AT_ONCE) -> Tensor:
        """Return the sum of the cross entropies of labelled tokens; the backward computes their logits again.

        Args:
            labels: [B, N]; -100 does not count.
            at_once: logits that exist together at most; one token's at least.
        """
        length = max(at_once // (len(labels) * self.vocabulary), 1)
        tiles = zip(self.hidden.split(length, dim=1), labels.split(length, dim=1), strict=True)
        losses = [
            # No layer of a head draws random numbers.
            checkpoint(self._summed, hidden, tile, use_reentrant=False, preserve_rng_state=False)
            for hidden, tile in tiles
        ]
        return torch.stack(losses).sum()

    def _summed(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return summed_cross_entropy(self.project(hidden), labels)


def summed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the cross entropies of labelled tokens, in fp32 at least.

    Args:
        logits: [B, N, V].
        labels: [B, N]; -100 does not count.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


NAME = "token_slices"
"""Attention implementation by which models call `attend`."""

_WITHOUT_EFFECT = {"position_ids", "position_embeddings", "use_cache", "cache_position", "output_attentions"}
"""Keywords that attention functions get and that change no output."""


def use_token_slices(model: "PreTrainedModel") -> None:
    """Let the attention layers of a model see earlier token slices. Its own forward no longer works then.

    Raises:
        UserError: if its attention cannot be exchanged.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise UserError(
            f"{type(model).__name__} does not call its attention by transformers' AttentionInterface, through which "
            "token slices see earlier ones: write its layers yourself, as in docs/how-to/own-models.md"
        )


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    past: Past | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention of a token slice to itself and to those before it.

    Args:
        query: [B, H, N, D].
        key: [B, G, N, D].
        value: [B, G, N, D].
        attention_mask: none, since padding is on the right, where no token that counts sees it.
        scaling: factor of the scores; 1 / sqrt(D) if None.
        is_causal: whether attention is causal, where the model gives it at each call.
        sliding_window: tokens that a token attends to, itself included; None for all before it.
        softcap: limit of the scores; None for none.
        **others: further arguments of a model's attention.

    Returns:
        Output [B, N, H, D], and no weights.

    Raises:
        UserError: if the model asks for another attention.
    """
    name = type(module).__name__
    if past is None:
        raise UserError(
            f"{name} attends without the `past` of a token slice: to run the model on its own again, call "
            "model.set_attn_implementation('eager'); layers that keep `past` from it cannot be trained here"
        )
    if attention_mask is not None or not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise UserError(f"{name} attends by a mask of its own, and token slices attend causally: no remedy is known")
    asked = {key: given for key, given in others.items() if given is not None and key not in _WITHOUT_EFFECT}
    if asked:
        raise UserError(
            f"{name} attends with {', '.join(sorted(asked))}, which token slices cannot: this model cannot be trained "
            "here"
        )
    heads_last = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return past.attend(*heads_last, scale=scaling, dropout=dropout, window=sliding_window, softcap=softcap), None


class PlacedDropout(nn.Module):
    """Dropout in the place of an `nn.Dropout`, whose masks depend only on the position of each element."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.p = probability
        self.place: tuple[Past, Iterator[int]] | None = None
        """The token slice, and the numbers of the dropouts still to come; None while the model runs on its own."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Zero elements of `inputs` [B, N, C], when training."""
        if not self.training or not self.p:
            return inputs
        if self.place is None:
            return functional.dropout(inputs, self.p)
        past, sites = self.place
        return past.dropout(inputs, self.p, site=next(sites))


class PlacedLayer(nn.Module):
    """A layer whose dropouts depend on the position of the token slice.

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
        """Set the position of the token slice in the dropouts during its forward."""
        place = (past, count(1))
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
            keywords["position_embeddings"] = past.cached_for_slice(
                name, lambda: rotary.to(hidden.device)(hidden, positions, *self._layer_type)
            )
        with self.at(past):
            outputs = self.layer(hidden, **keywords)
        return outputs[0] if isinstance(outputs, tuple) else outputs


class TiedWords(TiedLayerSpec):
    """The embedding of tokens, there already, which the first and the last stage share.

    Args:
        forward_fn: the computation of this layer; None = embed tokens.
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
        tiled: return their inputs, so that they are computed for some tokens at a time.
    """

    def project(hidden: Tensor) -> Tensor:
        return _capped(linear(hidden, words.weight), softcap)

    return TiledLogits(hidden, project, words.num_embeddings) if tiled else project(hidden)


class Head(nn.Module):
    """The projection to logits.

    Args:
        tiled: return the inputs of the logits, so that these are computed for some tokens at a time.
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
