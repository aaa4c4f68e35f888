"""The class of a preset, and the settings that the models of several publishers share."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A published model."""

    source: str
    """Who published it; the package says where."""

    published_parameters: float
    """Parameters as published."""

    settings: Mapping[str, Any]
    """Value of each field of the model section that it does not leave to its default."""


LLAMA: Mapping[str, Any] = MappingProxyType(
    {
        "position_embedding_type": "rope",
        "normalization": "rmsnorm",
        "activation": "swiglu",
        "disable_bias_linear": True,
    }
)
"""Settings of Llama and of most models after it, which GPT-2 does not have."""

UNTIED: Mapping[str, Any] = MappingProxyType({"untie_embeddings_and_output_weights": True})
"""An output layer with weights of its own."""


def preset(source: str, published: float, layers: int, hidden: int, heads: int, **more: Any) -> Preset:
    """Return a preset.

    Args:
        **more: other fields of the model section.
    """
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    return Preset(source=source, published_parameters=published, settings=MappingProxyType(sizes | more))
