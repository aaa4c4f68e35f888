"""The pipeline layers of a model of transformers, held against the model itself before they are given away."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor, nn

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.slicing import TokenSlices
from deepspeed_ext.runtime.saving import gathered_by_first_rank
from deepspeed_ext.runtime.sequence.sequence_state import SequenceState
from deepspeed_ext.runtime.stages import takes_past
from deepspeed_ext.transformers_layers.attention import NAME, use_token_slices
from deepspeed_ext.transformers_layers.layers import DecoderLayer, EmbeddingEnd, Head, TiedWords, tied_head
from deepspeed_ext.transformers_layers.parts import Parts, parts_of

if TYPE_CHECKING:  # Who uses no model of transformers need not have it.
    from transformers import PreTrainedModel

PROBE = TokenSlices((5, 1, 6))
"""Token slices in which the layers are held against the model."""
ENLARGED = 100.0
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference of a logit, to the largest logit, that is taken for rounding."""


def pipeline_layers(model: "PreTrainedModel", *, tiled_logits: bool = False) -> list[Any]:
    """Layers of a causal language model, as `TokenSlicePipelineModule` takes them.

    They are those of the model, which they train. A few tokens are sent through the model, and through the layers in
    token slices: where the logits differ, the model computes something that is not known here. From then on the
    attention of the model needs the pipeline; `model.set_attn_implementation("sdpa")` gives it back its own.

    Args:
        tiled_logits: let the last layer return `TiledLogits`, of which `summed_loss` computes the loss for some
            tokens at a time, so that no row of logits is kept until the backward. A loss function or `output_fn` of
            your own gets [B, N, V] from their `compute()`.

    Raises:
        UserError: if the model is no causal decoder, or one that these layers would compute differently.
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
            _check_logits(model, layers, tokens, expected)
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


def _check_logits(model: "PreTrainedModel", layers: Sequence[Any], tokens: Tensor, expected: Tensor) -> None:
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
        raise UserError(
            f"{name} computes logits that its layers in token slices do not (a difference of {difference:.1g} of the "
            "largest): write its layers yourself, as in docs/how-to/own-models.md"
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
    """Enlarge what the last layer gives the head, since logits are small before training, and their limit hides."""

    def enlarge(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        return (outputs[0] * ENLARGED, *outputs[1:]) if isinstance(outputs, tuple) else outputs * ENLARGED

    hook = layer.register_forward_hook(enlarge)
    try:
        yield
    finally:
        hook.remove()
