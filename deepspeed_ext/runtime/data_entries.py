"""Batches of dicts: entries of the data for layers, entries of the labels for the loss function.

Layers take entries by the names of their forwards' arguments (`ForwardArguments`).
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from deepspeed_ext.plan.errors import UserError

PAST = "past"
"""Argument of layers for the state of earlier token slices; no entry of the data may have this name."""

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class ForwardArguments:
    """Arguments of a forward other than its first, which is the output of the previous layer, and the past."""

    owner: str
    """Owner of the forward in messages."""
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
        """Read a function's arguments without the first `bound` ones, such as `self`."""
        try:
            parameters = list(inspect.signature(function).parameters.values())[bound:]
        except ValueError:
            # Functions written in C have no signature; as layers they take one tensor.
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
        """Read a layer's forward arguments: of a `LayerSpec`, `TiedLayerSpec`, module or function, on any rank."""
        bound = 0
        if isinstance(layer, TiedLayerSpec) and layer.forward_fn is not None:
            named, forward, bound = layer.forward_fn, layer.forward_fn, 1
        elif isinstance(layer, LayerSpec):
            named, forward, bound = layer.typename, layer.typename.forward, 1
        elif isinstance(layer, nn.Module):
            named, forward = type(layer), layer.forward
        else:
            named = forward = layer
        return cls.of(f"layer {number} ({getattr(named, '__name__', type(named).__name__)})", forward, bound=bound)

    def taken(self, names: Collection[str]) -> tuple[str, ...]:
        """The names that are arguments, without the first argument and the past."""
        if self.takes_all:
            return tuple(name for name in names if name not in (self.first, PAST))
        return tuple(name for name in names if name in self.required or name in self.optional)


class DataEntries:
    """Entries of the data by the layers with arguments of those names.

    The first layer's first argument is an entry too; other layers begin with the output of the previous layer. A stage
    with a layer that requires an entry reads the data. If a layer takes an entry by an argument with a default, its
    stage does so only if the entry is `declared`: such arguments are often no entries.

    Args:
        stages: numbers of the layers of each stage.
        declared: names of all entries, when known beforehand; None to find them in the first batch.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        stages: Sequence[range],
        loss_fn: Callable[..., Any] | None = None,
        declared: Collection[str] | None = None,
    ) -> None:
        self._layers = [ForwardArguments.of_layer(number, layer) for number, layer in enumerate(layers)]
        self._stages = stages
        self._loss: ForwardArguments | None = None
        if loss_fn is not None:
            self._loss = ForwardArguments.of("the loss function", getattr(loss_fn, "forward", loss_fn))
        self._declared = None if declared is None else frozenset(declared)
        self._checked: set[tuple[frozenset[str], frozenset[str]]] = set()
        if declared:
            self._check_layers(list(declared))

    @property
    def first(self) -> str:
        """Entry for the first argument of the first layer."""
        first = self._layers[0].first
        assert first is not None, "checked with the names of the entries"
        return first

    def name(self, layer: int) -> str:
        """Name of a layer in messages, by its number."""
        return self._layers[layer].owner

    def reader(self, stage: int) -> str | None:
        """Name of a layer for which a stage must read the data; None if there is none."""
        declared = self._declared or ()
        layers = (self._layers[number] for number in self._stages[stage])
        return next((each.owner for each in layers if each.required or each.taken(declared)), None)

    def given(self, layer: int, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Entries that a layer takes, by the names of its arguments."""
        return {name: entries[name] for name in self._layers[layer].taken(entries)}

    def given_to_stage(self, stage: int, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Entries that any layer of a stage takes, which must be on its device."""
        taken = {name for number in self._stages[stage] for name in self._layers[number].taken(entries)}
        if stage == 0:
            taken.add(self.first)
        return {name: entry for name, entry in entries.items() if name in taken}

    def given_to_loss(self, labels: Mapping[str, Any]) -> dict[str, Any]:
        """Entries of the labels that the loss function takes."""
        return {} if self._loss is None else {name: labels[name] for name in self._loss.taken(labels)}

    def check(self, inputs: Any, labels: Any, *, cutting_stages: Collection[int]) -> None:
        """Check the data and labels of a micro-batch, if they are dicts, against layers and loss function."""
        names = frozenset(inputs) if isinstance(inputs, Mapping) else None
        label_names = frozenset(labels) if isinstance(labels, Mapping) else None
        if (names, label_names) in self._checked:
            return
        if names is None:
            self._check_without_entries(inputs)
        else:
            self._check_layers(list(inputs))
            self._check_reading(list(inputs), cutting_stages)
        if label_names is not None and self._loss is not None:
            _check(self._loss, list(labels), "labels")
        self._checked.add((names, label_names))

    def _check_layers(self, names: Sequence[str]) -> None:
        if PAST in names:
            raise UserError(
                f"the data has an entry {PAST!r}, the name of the argument for earlier token slices: rename it"
            )
        if self._layers[0].first not in names:
            raise UserError(
                f"{self._layers[0].owner} starts from {self._layers[0].first!r}, which is not an entry of the data "
                f"({_listed(names)}): name an entry like the first layer's first argument"
            )
        for layer in self._layers:
            _check(layer, names, "data")

    def _check_reading(self, names: Sequence[str], cutting_stages: Collection[int]) -> None:
        missing = [name for name in self._declared or () if name not in names]
        if missing:
            raise UserError(
                f"the data has no entry {missing[0]!r} of data_entries ({_listed(names)}): yield it, or take it out of "
                "data_entries"
            )
        for stage, layers in enumerate(self._stages):
            for layer in (self._layers[number] for number in layers):
                if stage not in cutting_stages and layer.taken(names):
                    raise UserError(
                        f"{layer.owner} takes {layer.taken(names)[0]!r}, an entry of the data, by an argument with a "
                        f"default, and stage {stage} reads no data: build the module with data_entries="
                        f"{tuple(names)}, and give its rank the data iterator"
                    )

    def _check_without_entries(self, inputs: Any) -> None:
        if self._declared:
            raise UserError(
                f"the data is a {type(inputs).__name__}, and data_entries={tuple(sorted(self._declared))} names the "
                "entries of a dict: yield a dict of them with the labels"
            )
        for layer in self._layers:
            if layer.required:
                raise UserError(
                    f"{layer.owner} requires {layer.required[0]!r}, and the data is a {type(inputs).__name__}: yield a "
                    "dict with an entry of that name, with the labels"
                )


def _check(arguments: ForwardArguments, names: Sequence[str], source: str) -> None:
    if arguments.takes_unnamed:
        raise UserError(
            f"{arguments.owner} takes arguments without a name, which entries of the {source} cannot reach: name them"
        )
    missing = [name for name in arguments.required if name not in names]
    if missing:
        raise UserError(
            f"{arguments.owner} requires {missing[0]!r}, which is not an entry of the {source} ({_listed(names)}): "
            "yield it, or give the argument a default"
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "it has none"
