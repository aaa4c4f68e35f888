"""The attention function of token slices, as transformers' `AttentionInterface` calls it."""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.runtime.sequence.sequence_state import Past

if TYPE_CHECKING:  # Who uses no model of transformers need not have it.
    from transformers import PreTrainedModel

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
        is_causal: whether attention is causal, where the model says so at each call.
        sliding_window: tokens that a token attends to, itself included; None for all before it.
        softcap: limit of the scores; None for none.
        **others: what else a model hands to its attention.

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
