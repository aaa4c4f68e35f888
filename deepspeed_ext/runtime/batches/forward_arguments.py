"""Inputs that the layers of a model ask for by the names of their forwards' arguments."""

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

PAST = "past"
"""The argument by which a layer asks for what came before its token slice; no entry of the data can be called so."""

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class ForwardArguments:
    """Arguments of a forward beside its first, which is the output of the layer before, and the past."""

    owner: str
    """Owner of the forward, as errors name it."""
    first: str | None
    """Name of the first argument; None if it has none."""
    required: tuple[str, ...] = ()
    """Arguments that must be given."""
    optional: tuple[str, ...] = ()
    """Arguments with a default."""
    takes_past: bool = False
    """Has an argument named `past`."""
    takes_all: bool = False
    takes_unnamed: bool = False
    """Has `*arguments`, or arguments that cannot be given by name."""

    @classmethod
    def of(cls, owner: str, function: Callable[..., Any], *, bound: int = 0) -> "ForwardArguments":
        """Read a function's arguments.

        Args:
            bound: arguments before the first that somebody else gives, such as `self`.
        """
        try:
            parameters = list(inspect.signature(function).parameters.values())[bound:]
        except ValueError:
            # Functions written in C do not say; those that are used as layers take one tensor.
            return cls(owner, None)
        first = parameters[0].name if parameters and parameters[0].kind in _BY_NAME[:1] else None
        named = [each for each in parameters if each.kind in _BY_NAME and each.name not in (first, PAST)]
        unnamed = [each for each in parameters[1:] if each.kind is inspect.Parameter.POSITIONAL_ONLY]
        return cls(
            owner,
            first,
            required=tuple(each.name for each in named if each.default is inspect.Parameter.empty),
            optional=tuple(each.name for each in named if each.default is not inspect.Parameter.empty),
            takes_past=any(each.name == PAST and each.kind in _BY_NAME for each in parameters),
            takes_all=any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters),
            takes_unnamed=bool(unnamed) or any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters),
        )

    @classmethod
    def of_layer(cls, number: int, layer: Any) -> "ForwardArguments":
        """Read those of a layer, built or not: every rank can read those of all layers.

        Args:
            number: number of the layer, from 0.
            layer: a `LayerSpec`, a `TiedLayerSpec`, a module or a function.
        """
        if isinstance(layer, TiedLayerSpec) and layer.forward_fn is not None:
            return cls.of(f"layer {number} ({_name(layer.forward_fn)})", layer.forward_fn, bound=1)
        if isinstance(layer, LayerSpec):
            return cls.of(f"layer {number} ({layer.typename.__name__})", layer.typename.forward, bound=1)
        if isinstance(layer, nn.Module):
            return cls.of(f"layer {number} ({type(layer).__name__})", layer.forward)
        return cls.of(f"layer {number} ({_name(layer)})", layer)

    def taken(self, names: Collection[str]) -> tuple[str, ...]:
        """Names that can be given by name: not the first argument, and not the past."""
        if self.takes_all:
            return tuple(name for name in names if name not in (self.first, PAST))
        return tuple(name for name in names if name in self.required or name in self.optional)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)
