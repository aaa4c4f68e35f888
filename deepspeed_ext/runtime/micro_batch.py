"""Micro-batches: read, cut into token slices, copied to the device, joined again; and entries of those that are dicts.

Data, labels and outputs are tensors, or tuples, lists and dicts of such. Anything else is passed on unchanged. Of a
dict, layers take entries by the names of their forwards' arguments (`ForwardArguments`), and so does the loss function.
"""

import inspect
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.slicing import TokenSlices, parts_of_all_ranks
from deepspeed_ext.runtime.topology import SequenceParallelRanks

__all__ = ["SplitBatch", "TokenSliceBatch", "split_along_sequence"]


@dataclass(frozen=True, slots=True)
class TokenSliceBatch:
    """Data of one token slice of a micro-batch."""

    inputs: Any
    """Tensor or tuple of tensors for the first layer, or a dict of tensors that layers take by name."""
    labels: Any
    """Second argument of the loss function, or a dict of tensors that it takes by name."""
    loss_weight: float | Tensor
    """This token slice's share of the micro-batch's loss; the shares of a micro-batch sum to 1. Best a number, which is
    not copied to a device."""


SplitBatch = Callable[[Any, TokenSlices], list[TokenSliceBatch]]
"""Cuts one micro-batch of the data iterator, by the bounds of token slices or of one rank's parts of them.

Weights of the loss are shares of the whole micro-batch, also if other ranks have the rest."""


def split_along_sequence(batch: Any, token_slices: TokenSlices) -> list[TokenSliceBatch]:
    """Split a micro-batch of tensors whose second dimension is the sequence into token slices.

    Tensors without a sequence dimension go to every token slice whole. The loss function returns the mean over its
    tokens, so the weight of a token slice is its share of the tokens.

    Args:
        batch: `(inputs, labels)`, each a tensor [B, N, ...], or a tuple or dict of tensors.
    """
    if not isinstance(batch, Sequence) or len(batch) != 2:
        of_hugging_face = (
            "; for dicts of Hugging Face's loaders give the module split_batch of examples/transformers_layers"
        )
        raise UserError(
            f"the data iterator yields a {type(batch).__name__}, and micro-batches are pairs: yield (inputs, labels), "
            f"each a tensor, or a tuple or dict of tensors{of_hugging_face if isinstance(batch, Mapping) else ''}"
        )
    inputs, labels = batch
    for name, tensors in (("inputs", inputs), ("labels", labels)):
        _check_length(name, tensors, token_slices)
    return [
        TokenSliceBatch(
            cut_along_sequence(inputs, token_slices.seq_length, start, end),
            cut_along_sequence(labels, token_slices.seq_length, start, end),
            (end - start) / token_slices.seq_length,
        )
        for start, end in token_slices.bounds()
    ]


def _check_length(name: str, tensors: Any, token_slices: TokenSlices) -> None:
    found = list(tensors_in(tensors))
    # A dict has no main entry.
    found = found if isinstance(tensors, Mapping) else found[:1]
    if found and not any(_has_sequence(tensor, token_slices.seq_length) for tensor in found):
        shapes = " and ".join(str(tuple(tensor.shape)) for tensor in found)
        raise UserError(
            f"{name} of shape {shapes} do not have the {token_slices.seq_length} tokens of the token "
            f"slices {token_slices} in dimension 1: feed sequences of that length, or change the token slices"
        )


def _has_sequence(tensor: Tensor, length: int) -> bool:
    return tensor.dim() >= 2 and tensor.shape[1] == length


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors [...] of a tuple or dict of such, in order."""
    if torch.is_tensor(tree):
        yield tree
    elif isinstance(tree, Mapping):
        for entry in tree.values():
            yield from tensors_in(entry)
    elif isinstance(tree, (tuple, list)):
        for entry in tree:
            yield from tensors_in(entry)


def map_tensors(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Call a function with the tensors, or other leaves, at each place of trees of the same form."""
    if isinstance(tree, Mapping):
        return {name: map_tensors(function, entry, *(other[name] for other in others)) for name, entry in tree.items()}
    if isinstance(tree, (tuple, list)):
        return tuple(map_tensors(function, *entries) for entries in zip(tree, *others, strict=True))
    return function(tree, *others)


def cut_along_sequence(tensors: Any, seq_length: int, start: int, end: int) -> Any:
    """Tokens `start` to `end` (exclusive) of the tensors [B, N, ...] in a tree; other tensors stay as they are."""

    def cut(entry: Any) -> Any:
        return entry[:, start:end] if torch.is_tensor(entry) and _has_sequence(entry, seq_length) else entry

    return map_tensors(cut, tensors)


def to_device(tensors: Any, device: torch.device) -> Any:
    """Copy a tensor, or a tuple or dict of tensors, to a device, without a wait of the host."""
    return map_tensors(lambda entry: _moved(entry, device) if torch.is_tensor(entry) else entry, tensors)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device.type == "cpu" and device.type == get_accelerator().device_name() != "cpu":
        # Copies from other memory, and of tensors with gaps, make the host wait.
        tensor = tensor.contiguous()
        if not get_accelerator().is_pinned(tensor):
            tensor = get_accelerator().pin_memory(tensor)
    return tensor.to(device, non_blocking=True)


def parts_on_device(
    parts: Sequence[TokenSliceBatch], device: torch.device, seq_length: int, *, inputs: bool, labels: bool
) -> list[TokenSliceBatch]:
    """Copy the data of the token slices of a micro-batch, by one copy of the tensor from which they were cut.

    Dicts are not copied: their entries may be as wide as activations, and are copied for one token slice at a time.

    Args:
        inputs: whether inputs are read here.
        labels: whether labels and weights of the loss are read here.
    """
    wholes: dict[int, tuple[Tensor, Tensor]] = {}

    def move(entry: Any) -> Any:
        if not torch.is_tensor(entry) or entry.device == device:
            return entry
        whole = entry._base
        if (
            whole is None
            or whole.shape != (*entry.shape[:1], seq_length, *entry.shape[2:])
            or not whole.is_contiguous()
        ):
            return _moved(entry, device)
        if id(whole) not in wholes:
            wholes[id(whole)] = whole, _moved(whole, device)
        start = (entry.storage_offset() - whole.storage_offset()) // whole.stride(1)
        return wholes[id(whole)][1][:, start : start + entry.shape[1]]

    def moved(tree: Any, is_read: bool) -> Any:
        return map_tensors(move, tree) if is_read and not isinstance(tree, Mapping) else tree

    return [
        TokenSliceBatch(moved(part.inputs, inputs), moved(part.labels, labels), moved(part.loss_weight, labels))
        for part in parts
    ]


def detached(tensors: Any) -> Any:
    """The values of a tensor, or of a tuple or dict of such, without the graph that computed them."""
    return map_tensors(lambda entry: entry.detach() if torch.is_tensor(entry) else entry, tensors)


def join_token_slices(
    parts: Sequence[Any],
    token_slices: TokenSlices,
    ranks: SequenceParallelRanks | None = None,
    *,
    read_by_all: bool = False,
) -> Any:
    """Join the results of the token slices of a micro-batch, in the same form: the inverse of the cut.

    Tensors with a sequence dimension are concatenated along it; tensors that all token slices have in common are
    returned once; tensors [B, ...] or [] without one are stacked to [B, S, ...] or [S].

    Args:
        parts: data of each token slice, or of this rank's part of it: a tensor, or a tuple or dict of such.
        ranks: ranks that share the token slices, all of which must call this; None for one rank.
        read_by_all: whether these are data, of which each rank has the tensors without a sequence dimension.
    """
    ranks = ranks or SequenceParallelRanks()
    lengths = parts_of_all_ranks(token_slices, ranks.size).lengths

    def join(*pieces: Any) -> Any:
        common = all(piece is pieces[0] for piece in pieces)
        if ranks.size > 1 and torch.is_tensor(pieces[0]):
            if not (common and read_by_all) or _has_sequence(pieces[0], lengths[0]):
                pieces, common = tuple(part for piece in pieces for part in ranks.gather(piece)), False
        if common:
            return pieces[0]
        if all(_has_sequence(piece, length) for piece, length in zip(pieces, lengths, strict=True)):
            return torch.cat(pieces, dim=1)
        return torch.stack(pieces, dim=min(1, pieces[0].dim()))

    return map_tensors(join, *parts)


def join_micro_batches(wholes: Sequence[Any]) -> Any:
    """Join the results of micro-batches: rows after rows, and scalars to one dimension."""

    def join(*wholes: Any) -> Any:
        if not torch.is_tensor(wholes[0]):
            return wholes[0] if all(whole == wholes[0] for whole in wholes) else list(wholes)
        return torch.cat(wholes) if wholes[0].dim() else torch.stack(wholes)

    return map_tensors(join, *wholes)


class MicroBatchReader:
    """The micro-batches of an engine's batches, on one rank.

    Args:
        read: returns the next micro-batch of the data iterator; None on ranks without one.
    """

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = read
        self._ahead: deque[Any] = deque()
        self._ended = False

    def begin(self) -> None:
        """Start a batch."""
        self._ahead, self._ended = deque(), False

    def read_ahead(self, number: int) -> Sequence[Any]:
        """Read the first micro-batches of a batch, and return them, fewer where the iterator ends before."""
        while len(self._ahead) < number and not self._ended:
            try:
                self._ahead.append(self._read())
            except StopIteration:
                self._ended = True  # an error where the missing micro-batch is taken
        return self._ahead

    def take(self) -> Any:
        """The next micro-batch, which may have been read ahead."""
        if self._ahead:
            return self._ahead.popleft()
        if self._ended:
            raise StopIteration
        return self._read()


# ---------------------------------------------------------------------- entries of dicts

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
