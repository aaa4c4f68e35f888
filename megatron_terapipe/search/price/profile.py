"""The profile of a machine: times of ops, messages and the engine, and the files that `measure` writes with them."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import astuple
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, TypeGuard

from pydantic import BeforeValidator, Field, PrivateAttr

from deepspeed_ext.plan.terminal import write_json
from megatron_terapipe.search.machine.documents import read_document
from megatron_terapipe.search.machine.entries import (
    Count,
    CountOrNone,
    NotNegative,
    Text,
    WrittenEntry,
    fixed,
    is_number,
    read_entry,
)
from megatron_terapipe.search.price.workload import Layer, LayerKind, Parallel


class LayerShape(WrittenEntry):
    """The properties of a layer that its times depend on, except the lengths of sequences and token slices."""

    kind: LayerKind
    hidden_size: Count
    products: tuple[tuple[Count, Count, Parallel], ...] = ()
    """Inputs, outputs, and how tensor-parallel ranks share each."""
    attention: tuple[CountOrNone, CountOrNone, CountOrNone] | None = None
    """Query heads, key and value heads, head size."""
    num_norms: CountOrNone
    activation_width: CountOrNone
    gated: bool
    normed_heads: bool = False
    written_out: bool = False
    sliding_window: Count | None = None
    latent: tuple[int, Count, Count, Count, Count] | None = None
    """Fields of `LatentSizes`."""
    recurrence: tuple[str, Count, Count, Count, Count, Count] | None = None
    """Fields of `Recurrence`."""

    @classmethod
    @cache
    def of(cls, layer: Layer) -> "LayerShape":
        """Return the shape of a layer."""
        attention = layer.attention
        same = ("kind", "hidden_size", "num_norms", "activation_width", "gated")
        return cls.model_construct(
            **{name: getattr(layer, name) for name in same},
            products=tuple((each.inputs, each.outputs, each.parallel) for each in layer.products),
            attention=attention and (attention.query_heads, attention.key_value_heads, attention.head_size),
            latent=attention and attention.latent and astuple(attention.latent),
            normed_heads=attention is not None and attention.normed,
            written_out=attention is not None and attention.written_out,
            sliding_window=attention and attention.sliding_window,
            recurrence=layer.recurrence and astuple(layer.recurrence),
        )

    def __str__(self) -> str:
        heads = f", {self.attention[0]} heads" if self.attention else ""
        if self.sliding_window is not None:
            heads += f" in a window of {self.sliding_window}"
        if self.recurrence is not None:
            heads = f", {self.recurrence[0]} of {self.recurrence[1]} heads"
        vocabulary = f", {self.products[0][1]} outputs" if self.kind == "head" else ""
        width = f", MLP of {self.activation_width}" if self.kind == "block" and self.activation_width else ""
        article = "an" if self.kind[0] in "aeiou" else "a"
        return f"{article} {self.kind} of hidden size {self.hidden_size}{heads}{width}{vocabulary}"


class OpPoint(NamedTuple):
    """The measured ops of one token slice of one micro-batch, in one layer."""

    micro_batch_size: int
    start: int
    end: int
    forward_s: float
    input_gradient_s: float
    weight_gradient_s: float
    """BW; both together are the time of an undivided backward."""


POINT = "[micro-batch size, start, end, forward, input gradient and weight gradient in seconds]"


def _op_point(row: object) -> OpPoint:
    if not _is_row(row, 6):
        raise ValueError(f"is not {POINT}, none below 0: measure again")
    size, start, end, *seconds = row
    if any(value != int(value) for value in (size, start, end)) or size < 1 or not start < end:
        raise ValueError("has an empty token slice or micro-batch: measure again")
    return OpPoint(int(size), int(start), int(end), *seconds)


def _message(row: object) -> tuple[int, float]:
    if not _is_row(row, 2):
        raise ValueError("is not [bytes, seconds], none below 0: measure again")
    return int(row[0]), float(row[1])


def _is_row(row: Any, width: int) -> TypeGuard[tuple[float, ...]]:
    return isinstance(row, list | tuple) and len(row) == width and all(is_number(value) and value >= 0 for value in row)


class ProfiledLayer(WrittenEntry):
    """A layer as one tensor-parallel rank computes it; reductions between ranks are not in the times."""

    shape: LayerShape
    tensor_parallel_size: Count
    recompute: Literal["none", "selective"]
    points: tuple[Annotated[OpPoint, BeforeValidator(_op_point)], ...] = Field(min_length=1)


class ProfiledLink(WrittenEntry):
    """Messages of several sizes over one kind of link."""

    where: Literal["inside", "network"]
    what: Literal["all_reduce", "transfer"]
    """`all_reduce` among the ranks of a group, or `transfer` from one to another."""
    num_ranks: Annotated[int, Field(ge=2)]
    points: tuple[Annotated[tuple[int, float], BeforeValidator(_message)], ...] = Field(min_length=1)
    """(bytes, seconds)."""
    ranks_per_node: Count = 1
    flows: Count = 1
    """Groups that used the links of a node at the same time; of the network, they share its cards."""


class ProfiledEngine(WrittenEntry):
    """Time of the engine outside of layers, in seconds."""

    op_s: NotNegative
    """Between two ops of a rank: programs, buffers, the executor."""
    optimizer_s_per_parameter: NotNegative
    """Norm of the gradient and optimizer step."""
    iteration_s: NotNegative
    """An iteration, however small it is."""


FORMAT = "terapipe-profile-1"
"""First field of the file, which differs in other files and in later formats."""


class Profile(WrittenEntry):
    """A measured profile, in the form of its file."""

    format: Annotated[str, fixed(FORMAT, "give a file that `terapipe search measure` wrote")]
    device: Text
    """Name of the accelerator, or of the processor."""
    accelerator: Text
    """DeepSpeed's name of it: cuda, cpu, ..."""
    num_devices: Count
    """Ranks of a node that computed at the same time, one on each device."""
    num_nodes: Count = 1
    """Nodes that took part; with one, the network was not measured."""
    precision: Literal["fp32", "fp16", "bf16"]
    own_model: Text | None = None
    """Program whose own layers were measured: those before its blocks as the embedding of a GPT of the same flags, and
    those after them with the loss as its head. None = the GPT's."""
    software: dict[str, Any] = Field(default_factory=dict)
    """Versions of packages."""
    engine: ProfiledEngine | None = None
    """None if it was not measured."""
    links: tuple[ProfiledLink, ...] = ()
    layers: tuple[ProfiledLayer, ...] = Field(min_length=1)
    _source: str = PrivateAttr("")

    @property
    def source(self) -> str:
        """The file, for errors; empty if it was just measured."""
        return self._source

    def links_of(self, where: str) -> list[ProfiledLink]:
        """Links `inside` nodes, or of the `network`."""
        return [link for link in self.links if link.where == where]


def sizes_measured_once(profile: Profile) -> Iterator[str]:
    """Yield descriptions of micro-batches and token slices with only one measured size: times of others are a guess."""
    found: dict[str, list[int]] = defaultdict(list)
    for layer in profile.layers:
        if layer.shape.kind == "block" and layer.recompute == "none":
            rows = {point.micro_batch_size for point in layer.points}
            lengths = {point.end - point.start for point in layer.points}
            single = [f"micro-batches of {size}" for size in rows if len(rows) == 1]
            single += [f"token slices of {length} tokens" for length in lengths if len(lengths) == 1]
            if single:
                found[" and ".join(single)].append(layer.tensor_parallel_size)
    for description, sizes in found.items():
        yield f"{description} (tensor-parallel size {' and '.join(map(str, sorted(set(sizes))))})"


NUMBERS = re.compile(r"\[\s*((?:-?[\d.eE+-]+,\s*)*-?[\d.eE+-]+)\s*\]")
"""A list of numbers, as `json` spreads it over lines."""

_RARE = ("normed_heads", "written_out", "sliding_window")
"""Fields of a shape that files omit unless they are set."""


def profile_to_json(profile: Profile) -> dict[str, Any]:
    """The JSON object of a profile."""
    document: dict[str, Any] = profile.model_dump(mode="json")
    for layer in document["layers"]:
        layer["shape"] = {name: value for name, value in layer["shape"].items() if value or name not in _RARE}
    return document


def write_profile(profile: Profile, path: str) -> None:
    """Write a profile, each point on its own line."""
    text = json.dumps(profile_to_json(profile), indent=1)
    # Lists of numbers, which `json` spreads over many lines, on one.
    write_json(path, NUMBERS.sub(lambda found: "[" + " ".join(found[1].split()) + "]", text))


def read_profile(path: str) -> Profile:
    """Read a profile."""
    profile = parse_profile(read_document(path), path)
    profile._source = path
    return profile


def parse_profile(document: object, where: str) -> Profile:
    """Read a profile from the object of a file."""
    return read_entry(Profile, document, where)
