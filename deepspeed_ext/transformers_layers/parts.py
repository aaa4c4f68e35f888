"""The parts of a causal language model of transformers, found by its structure."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from deepspeed_ext.plan.errors import UserError

if TYPE_CHECKING:  # Who uses no model of transformers need not have it.
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Parts of a decoder, in the order in which they run."""

    words: nn.Module
    """Embedding of tokens."""
    positions: nn.Embedding | None
    """Embedding of positions, added to that of tokens; None where there is none."""
    dropout: nn.Dropout | None
    """Dropout of the embeddings; None where there is none."""
    rotary: nn.Module | None
    """Gives `position_embeddings` of the decoder layers; None where there are none."""
    decoder_layers: nn.ModuleList
    norm: nn.Module | None
    """Norm behind the last decoder layer; None where there is none."""
    head: nn.Linear
    softcap: float | None
    """Limit c of the logits: x becomes c tanh(x / c); None for none."""
    layer_types: tuple[str, ...] | None
    """Kind of attention of each decoder layer; None where all are of one."""

    @property
    def tied(self) -> bool:
        """Whether the head has the weight of the embedding."""
        return self.head.weight is self.words.weight


def parts_of(model: "PreTrainedModel") -> Parts:
    """Return the parts of a model.

    Raises:
        UserError: if it is no decoder of tokens, or has a part of an unknown kind.
    """
    _check_kind(model)
    base, head = model.base_model, model.get_output_embeddings()
    outside = [name for name, child in model.named_children() if child not in (base, head)]
    if outside or base is model or not isinstance(head, nn.Linear):
        raise _unknown(model, outside[0] if outside else "head")
    found: dict[str, Any] = {}
    for name, child in base.named_children():
        kind = _kind(child, model)
        if kind is None or kind in found:
            raise _unknown(model, f"{model.base_model_prefix}.{name} ({type(child).__name__})")
        found[kind] = child
    for kind in ("words", "decoder_layers"):
        if kind not in found:
            raise _unknown(model, f"without {kind.replace('_', ' ')}")
    layer_types = getattr(model.config, "layer_types", None)
    optional: dict[str, Any] = dict.fromkeys(("positions", "dropout", "rotary", "norm"))
    parts = Parts(
        **optional | found,
        head=head,
        softcap=getattr(model.config, "final_logit_softcapping", None),
        layer_types=None if layer_types is None else tuple(layer_types),
    )
    if parts.tied and head.bias is not None:
        raise _unknown(model, "head with the embedding's weight and a bias")
    return parts


def _check_kind(model: "PreTrainedModel") -> None:
    """Refuse models whose configuration says what they are."""
    from transformers import PreTrainedModel

    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise UserError(f"{name} is no model of transformers: hand over what AutoModelForCausalLM gives")
    config = model.config
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise UserError(f"{name} has an encoder or cross-attention, and token slices are of causal decoders: use one")
    if config.sub_configs:
        raise UserError(f"{name} has models inside of it ({', '.join(config.sub_configs)}): hand over its text model")
    layer_types = set(getattr(config, "layer_types", None) or ())
    if unknown := sorted(layer_types - {"full_attention", "sliding_attention"}):
        raise UserError(f"{name} has layers of the type {unknown[0]}, which cannot be trained in token slices here")
    if growing := _rope_types(config) & {"dynamic", "longrope"}:
        raise UserError(
            f"{name} has {' and '.join(growing)} rotary embeddings, which depend on the length of the sequence, and a "
            "token slice does not know it: this model cannot be trained here"
        )
    if getattr(config, "output_router_logits", False):
        raise UserError(
            f"{name} adds a loss of its routers, which token slices leave out: set config.output_router_logits = False"
        )
    if getattr(config, "layerdrop", 0):
        raise UserError(f"{name} leaves out layers at random (layerdrop={config.layerdrop}): set config.layerdrop = 0")
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise UserError(
            f"{name} has gradient checkpointing of its own: call model.gradient_checkpointing_disable(), and build the "
            "pipeline module with activation_checkpoint_interval=1"
        )


def _rope_types(config: Any) -> set[str]:
    """Kinds of rotary embeddings; a configuration has one for all layers, or one by kind of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    each = [entry for entry in rope.values() if isinstance(entry, dict)] or [rope]
    return {str(entry.get("rope_type", "default")) for entry in each}


def _kind(child: nn.Module, model: "PreTrainedModel") -> str | None:
    """Which of the parts a child of the decoder is; None if it is none."""
    name = type(child).__name__
    if child is model.get_input_embeddings():
        return "words"
    if isinstance(child, nn.ModuleList) and len(child) == model.config.num_hidden_layers:
        return "decoder_layers"
    if name.endswith("RotaryEmbedding"):
        return "rotary"
    if type(child) is nn.Embedding:
        return "positions"
    if isinstance(child, nn.Dropout):
        return "dropout"
    return "norm" if "Norm" in name else None


def _unknown(model: "PreTrainedModel", what: str) -> UserError:
    return UserError(
        f"{type(model).__name__} is built in a way that is not known here ({what}): write its layers yourself, as in "
        "docs/how-to/own-models.md"
    )
