"""The pipeline layers of a causal language model of transformers: parts, batches, and a check against the model."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor, nn
from torch.nn import functional

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.micro_batch import TokenSliceBatch, split_along_sequence
from deepspeed_ext.runtime.module import takes_past
from deepspeed_ext.runtime.saved_files import gathered_by_first_rank
from deepspeed_ext.runtime.state.sequence_state import SequenceState

from .layers import (
    IGNORED,
    NAME,
    DecoderLayer,
    EmbeddingEnd,
    Head,
    TiedWords,
    TiledLogits,
    summed_cross_entropy,
    tied_head,
    use_token_slices,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Parts of a decoder, in the order in which they run."""

    words: nn.Module
    """Embedding of tokens."""
    positions: nn.Embedding | None
    """Embedding of positions, added to the embedding of tokens; None where there is none."""
    dropout: nn.Dropout | None
    """Dropout of the embeddings; None where there is none."""
    rotary: nn.Module | None
    """Gives `position_embeddings` of the decoder layers; None where there are none."""
    decoder_layers: nn.ModuleList
    norm: nn.Module | None
    """Norm after the last decoder layer; None if there is none."""
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
        UserError: if it is not a decoder of tokens, or has a part of an unknown kind.
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
    """Refuse models by their configuration."""
    from transformers import PreTrainedModel

    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise UserError(f"{name} is not a model of transformers: pass one of AutoModelForCausalLM")
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
            f"{name} has {' and '.join(growing)} rotary embeddings, which depend on the length of the whole "
            "sequence: this model cannot be trained here"
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


ENTRIES = ("input_ids", "labels", "attention_mask")


def split_batch(batch: Any, token_slices: TokenSlices) -> list[TokenSliceBatch]:
    """Split a micro-batch of a Hugging Face data loader into token slices.

    The label of a token is the token itself, and -100 does not count, as in transformers: labels are shifted here. A
    token slice is weighted so that the sum over token slices is the mean over all labelled tokens of the micro-batch.

    Args:
        batch: a dict of `input_ids` [B, N], `labels` [B, N] and, if rows are padded on the right, `attention_mask`
            [B, N].
        token_slices: lengths of the token slices.

    Raises:
        UserError: if it is not such a dict, is padded elsewhere, has labels on its padding, or none at all.
    """
    if not isinstance(batch, Mapping) or any(name not in batch for name in ENTRIES[:2]):
        found = ", ".join(map(repr, batch)) if isinstance(batch, Mapping) else type(batch).__name__
        raise UserError(
            f"the data loader yields {found}, and micro-batches of Hugging Face are dicts with 'input_ids' and "
            "'labels': take a collator that yields them, such as DataCollatorForLanguageModeling(mlm=False)"
        )
    others = [name for name, entry in batch.items() if name not in ENTRIES and entry is not None]
    if others:
        raise UserError(
            f"the data loader yields {others[0]!r}, which a model would take and token slices cannot: drop it in the "
            "collator"
        )
    tokens, labels = batch["input_ids"], _shifted(batch["labels"])
    if (mask := batch.get("attention_mask")) is not None:
        _check_padding(mask, labels)
    num_labelled = labelled_tokens(batch)
    if not num_labelled:
        raise UserError("a micro-batch has no label but -100, so its loss has no value: leave such rows out")
    return [
        TokenSliceBatch(part.inputs, part.labels, 1 / num_labelled)
        for part in split_along_sequence((tokens, labels), token_slices)
    ]


def labelled_tokens(batch: Mapping[str, Any]) -> int:
    """Number of tokens of a micro-batch that count in the loss, for the module's `loss_tokens`."""
    return int((_shifted(batch["labels"]) != IGNORED).sum())


def _shifted(labels: Tensor) -> Tensor:
    """Labels [B, N] of the token after each, as transformers shifts them; the last one has none."""
    return functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


def summed_loss(logits: Tensor | TiledLogits, labels: Tensor) -> Tensor:
    """Sum of the cross entropies of labelled tokens, in fp32 at least; `split_batch` makes the mean of it.

    Args:
        logits: [B, N, V], or their inputs, from which they are computed for some tokens at a time.
        labels: [B, N]; -100 does not count.
    """
    if isinstance(logits, TiledLogits):
        return logits.summed_loss(labels)
    return summed_cross_entropy(logits, labels)


def _check_padding(mask: Tensor, labels: Tensor) -> None:
    """Refuse padding that a labelled token would attend to: causal attention hides only padding on the right.

    Args:
        mask: [B, N], 0 where a token is padding.
        labels: [B, N] of the token after each.
    """
    if mask.dim() != 2:
        raise UserError(f"attention_mask has the shape {tuple(mask.shape)}, and rows have one flag for each token")
    keeps = mask.bool()
    wrong = (keeps[:, 1:] & ~keeps[:, :-1]).any(dim=1)
    if wrong.any():
        raise UserError(
            f"attention_mask hides tokens before others in row {int(wrong.nonzero()[0])}, and causal attention would "
            "see them: pad on the right (tokenizer.padding_side = 'right')"
        )
    if ((labels != IGNORED) & ~keeps).any():
        raise UserError("labels of padding count in the loss: give them the label -100")


PROBE = TokenSlices((5, 1, 6))
"""Token slices in which the layers are held against the model."""
ENLARGED = 100.0
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference of a logit, to the largest logit, that is taken for rounding."""


def pipeline_layers(model: "PreTrainedModel", *, tiled_logits: bool = False) -> list[Any]:
    """Layers of a causal language model, as `TokenSlicePipelineModule` takes them.

    They share the model's weights, which they train. A few tokens are sent through the model, and through the layers in
    token slices: where the logits differ, the model computes something that is not known here. From then on the
    attention of the model needs the pipeline; `model.set_attn_implementation("sdpa")` gives it back its own.

    Args:
        tiled_logits: let the last layer return `TiledLogits`, of which `summed_loss` computes the loss for some
            tokens at a time, so that no row of logits is kept until the backward. A loss function or `output_fn` of
            your own gets [B, N, V] from their `compute()`.

    Raises:
        UserError: if the model is not a causal decoder, or one that these layers would compute differently.
    """
    parts = parts_of(model)
    tokens = torch.arange(PROBE.seq_length, device=model.device).unsqueeze(0) % parts.words.num_embeddings
    if model.config._attn_implementation == NAME:  # It was handed over before, or a model with its configuration.
        model.set_attn_implementation("eager")
    own_attention = model.config._attn_implementation
    with _enlarged(parts.norm or parts.decoder_layers[-1]):
        with torch.no_grad(), _mode([model], training=False):
            expected = model(input_ids=tokens, use_cache=False).logits
        try:
            use_token_slices(model)
            layers = _layers(parts)
            _check_logits(model, layers, tokens, expected, own_attention)
            _check_random_numbers(model, layers, tokens)
            if tiled_logits:
                layers[-1] = _head(parts, tiled=True)
        except UserError:
            model.set_attn_implementation(own_attention)
            raise
    return layers


def gathered_state_dict(engine: PipelineEngine, model: "PreTrainedModel") -> dict[str, Tensor] | None:
    """Weights of the layers of all pipeline ranks, by their names in the model, for `model.save_pretrained`.

    Args:
        engine: engine of this rank; every rank must call this.

    Returns:
        The weights [...] on rank 0, on the CPU; None on all others.
    """
    engine.complete_weights()
    own = set(engine.module.parameters())
    return gathered_by_first_rank(engine, {name: weight for name, weight in model.named_parameters() if weight in own})


def read_checkpoint(model: "PreTrainedModel", folder: str | Path) -> None:
    """Give a model the weights that the trainer saved of its layers, for `model.save_pretrained`.

    Args:
        folder: of one checkpoint, `checkpoints/global_step10`.
    """
    for number, layer in enumerate(_layers(parts_of(model))):
        file = Path(folder) / f"layer_{number:02}-model_00-model_states.pt"
        module = layer.build() if isinstance(layer, TiedWords) else layer
        if number == 0 or module is not model.get_input_embeddings():  # A tied head is in the first file.
            module.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))


def _layers(parts: Parts) -> list[Any]:
    layer_types = parts.layer_types if parts.rotary is not None and _asks_for_type(parts.rotary) else None
    layers: list[Any] = [TiedWords(parts.words) if parts.tied else parts.words]
    if parts.positions is not None or parts.dropout is not None:
        layers.append(EmbeddingEnd(parts.positions, parts.dropout))
    for number, layer in enumerate(parts.decoder_layers):
        layers.append(DecoderLayer(layer, parts.rotary, None if layer_types is None else layer_types[number]))
    if parts.norm is not None:
        layers.append(parts.norm)
    return [*layers, _head(parts)]


def _head(parts: Parts, *, tiled: bool = False) -> Any:
    if parts.tied:
        return TiedWords(parts.words, partial(tied_head, softcap=parts.softcap, tiled=tiled))
    return Head(parts.head, parts.softcap, tiled=tiled)


def _asks_for_type(rotary: nn.Module) -> bool:
    return "layer_type" in signature(rotary.forward).parameters


@torch.no_grad()
def _logits(layers: Sequence[Any], tokens: Tensor, *, training: bool = False) -> Tensor:
    """Logits [B, N, V] of the layers, in token slices."""
    state, functions = SequenceState(PROBE), [_function(layer) for layer in layers]
    logits = []
    with _mode([each for each in functions if isinstance(each, nn.Module)], training=training):
        for token_slice, (start, end) in enumerate(PROBE.bounds()):
            hidden = tokens[:, start:end]
            for number, function in enumerate(functions):
                keywords = {"past": state.past(number, token_slice)} if takes_past(function) else {}
                hidden = function(hidden, **keywords)
            logits.append(hidden)
    return torch.cat(logits, dim=1)


def _function(layer: Any) -> Any:
    if not isinstance(layer, TiedWords):
        return layer
    words = layer.build()
    return words if layer.forward_fn is None else partial(layer.forward_fn, words)


def _check_logits(
    model: "PreTrainedModel", layers: Sequence[Any], tokens: Tensor, expected: Tensor, own_attention: str
) -> None:
    """Refuse a model that computes other logits [B, N, V] than its layers do in token slices."""
    name = type(model).__name__
    try:
        found = _logits(layers, tokens)
    except UserError:
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"{name} has decoder layers that do not run in token slices ({type(error).__name__}: {reason}): write its "
            "layers yourself, as in docs/how-to/own-models.md"
        ) from error
    difference = float((found - expected).abs().max() / expected.abs().max())
    if not difference <= TOLERANCES[expected.dtype]:
        remedy = "write its layers yourself, as in docs/how-to/own-models.md"
        if expected.dtype is torch.float64 and own_attention == "eager":
            remedy = 'its eager attention may compute the softmax in fp32: load it with attn_implementation="sdpa"'
        raise UserError(
            f"{name} computes logits that its layers in token slices do not (a difference of {difference:.1g} of the "
            f"largest): {remedy}"
        )


def _check_random_numbers(model: "PreTrainedModel", layers: Sequence[Any], tokens: Tensor) -> None:
    """Refuse dropout that is not an `nn.Dropout`: its masks would depend on the token slices."""
    device = tokens.device
    forked = {"devices": []} if device.type == "cpu" else {"devices": [device], "device_type": device.type}
    with torch.random.fork_rng(**forked):
        first, second = (_logits(layers, tokens, training=True) for _ in range(2))
    if not torch.equal(first, second):
        raise UserError(
            f"{type(model).__name__} draws random numbers in its layers, which would depend on the token slices: set "
            "its dropout to 0 in its config"
        )


@contextmanager
def _mode(modules: Sequence[nn.Module], *, training: bool) -> Iterator[None]:
    """Let modules train or evaluate, and leave each as it was."""
    modes = [(each, each.training) for module in modules for each in module.modules()]
    for module in modules:
        module.train(training)
    try:
        yield
    finally:
        for module, was in modes:
            module.training = was


@contextmanager
def _enlarged(layer: nn.Module) -> Iterator[None]:
    """Enlarge the output of the last layer: logits are small before training, so that their limit has no effect."""

    def enlarge(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        return outputs * ENLARGED if torch.is_tensor(outputs) else (outputs[0] * ENLARGED, *outputs[1:])

    hook = layer.register_forward_hook(enlarge)
    try:
        yield
    finally:
        hook.remove()
