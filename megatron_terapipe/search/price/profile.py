"""The profile of a machine: times of ops, messages and the engine, and the files that `measure` writes with them."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple, TypeGuard

from pydantic import BeforeValidator, Field

from deepspeed_ext.plan.terminal import write_json
from megatron_terapipe.search.machine.documents import read_document
from megatron_terapipe.search.machine.entries import (
    Count,
    CountOrNone,
    Entry,
    NotNegative,
    Text,
    fixed,
    is_number,
    read_entry,
)
from megatron_terapipe.search.price.workload import Attention, Layer, LayerKind, Product


class LayerShape(NamedTuple):
    """What the times of a layer depend on, apart from the length of the sequence and what it holds beside products."""

    kind: LayerKind
    hidden_size: int
    products: tuple[Product, ...]
    attention: Attention | None
    num_norms: int
    activation_width: int
    gated: bool

    @classmethod
    def of(cls, layer: Layer) -> "LayerShape":
        """Return the shape of a layer."""
        return cls(*(getattr(layer, name) for name in cls._fields))

    @property
    def window(self) -> int | None:
        """Sliding window of its attention, in tokens; None = without one."""
        return None if self.attention is None else self.attention.sliding_window

    def __str__(self) -> str:
        heads = f", {self.attention.query_heads} heads" if self.attention else ""
        if self.window is not None:
            heads += f" in a window of {self.window}"
        vocabulary = f", {self.products[0].outputs} outputs" if self.kind == "head" else ""
        width = f", MLP of {self.activation_width}" if self.kind == "block" else ""
        return f"a {self.kind} of hidden size {self.hidden_size}{heads}{width}{vocabulary}"

    def to_json(self) -> dict[str, Any]:
        """The JSON object of a shape."""
        attention = self.attention
        document = self._asdict() | {
            "products": [[each.inputs, each.outputs, each.parallel] for each in self.products],
            "attention": attention and [attention.query_heads, attention.key_value_heads, attention.head_size],
        }
        # What most layers do not have is not in their entries.
        more = {"normed_heads": attention.normed, "written_out": attention.written_out} if attention else {}
        return (
            document
            | {name: True for name, has in more.items() if has}
            | ({} if self.window is None else {"sliding_window": self.window})
        )


class OpPoint(NamedTuple):
    """The measured ops of one token slice of one micro-batch, in one layer."""

    micro_batch_size: int
    start: int
    end: int
    forward_s: float
    input_gradient_s: float
    weight_gradient_s: float
    """BW; both together are what the backward takes in one piece."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledLayer:
    """A layer as one tensor-parallel rank computes it; reductions between ranks are not in the times."""

    shape: LayerShape
    tensor_parallel_size: int
    recompute: Literal["none", "selective"]
    points: tuple[OpPoint, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledLink:
    """Messages of several sizes over one kind of link."""

    where: Literal["inside", "network"]
    what: Literal["all_reduce", "transfer"]
    """`all_reduce` among the ranks of a group, or `transfer` from one to another."""
    num_ranks: int
    points: tuple[tuple[int, float], ...]
    """(bytes, seconds)."""
    ranks_per_node: int = 1
    flows: int = 1
    """Groups that used the links of a node at the same time; of the network, they share its cards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledEngine:
    """Time of the engine beside the layers, in seconds."""

    op_s: float
    """Between two ops of a rank: programs, buffers, the executor."""
    optimizer_s_per_parameter: float
    """Norm of the gradient and optimizer step."""
    iteration_s: float
    """An iteration, however small it is."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A measured profile."""

    source: str = ""
    """The file, for errors; empty if it was just measured."""
    device: str
    """Name of the accelerator, or of the processor."""
    accelerator: str
    """What DeepSpeed calls it: cuda, cpu, ..."""
    num_devices: int
    """Ranks of a node that computed at the same time, one on each device."""
    precision: str
    software: tuple[tuple[str, str], ...]
    layers: tuple[ProfiledLayer, ...]
    links: tuple[ProfiledLink, ...] = ()
    engine: ProfiledEngine | None = None
    """What else an iteration takes; None if it was not measured."""
    num_nodes: int = 1
    """Nodes that took part; with one, nothing was measured of the network."""

    def links_of(self, where: str) -> list[ProfiledLink]:
        """Links `inside` nodes, or those of the `network`."""
        return [link for link in self.links if link.where == where]


def lone_sizes(profile: Profile) -> Iterator[str]:
    """Yield, in words, micro-batches and token slices of which one size alone was measured: all others are a guess."""
    found: dict[str, list[int]] = defaultdict(list)
    for layer in profile.layers:
        if layer.shape.kind == "block" and layer.recompute == "none":
            rows = {point.micro_batch_size for point in layer.points}
            lengths = {point.end - point.start for point in layer.points}
            alone = [f"micro-batches of {size}" for size in rows if len(rows) == 1]
            alone += [f"token slices of {length} tokens" for length in lengths if len(lengths) == 1]
            if alone:
                found[" and ".join(alone)].append(layer.tensor_parallel_size)
    for alone_in_words, sizes in found.items():
        yield f"{alone_in_words} (tensor-parallel size {' and '.join(map(str, sorted(set(sizes))))})"


FORMAT = "terapipe-profile-1"
"""First field of the file: other files, and later formats, are told apart by it."""

POINT = "[micro-batch size, start, end, forward, input gradient and weight gradient in seconds]"


NUMBERS = re.compile(r"\[\s*((?:-?[\d.eE+-]+,\s*)*-?[\d.eE+-]+)\s*\]")
"""A list of numbers, as `json` spreads it over lines."""


def profile_to_json(profile: Profile) -> dict[str, Any]:
    """The JSON object of a profile."""
    return {
        "format": FORMAT,
        "device": profile.device,
        "accelerator": profile.accelerator,
        "num_devices": profile.num_devices,
        "num_nodes": profile.num_nodes,
        "precision": profile.precision,
        "software": dict(profile.software),
        "engine": profile.engine and asdict(profile.engine),
        "links": [asdict(link) | {"points": [list(point) for point in link.points]} for link in profile.links],
        "layers": [
            {
                "shape": layer.shape.to_json(),
                "tensor_parallel_size": layer.tensor_parallel_size,
                "recompute": layer.recompute,
                "points": [list(point) for point in layer.points],
            }
            for layer in profile.layers
        ],
    }


def write_profile(profile: Profile, path: str) -> None:
    """Write a profile, each point on its own line."""
    text = json.dumps(profile_to_json(profile), indent=1)
    # Lists of numbers, which `json` spreads over many lines, on one.
    write_json(path, NUMBERS.sub(lambda found: "[" + " ".join(found[1].split()) + "]", text))


class ShapeEntry(Entry):
    """The shape of a layer."""

    kind: LayerKind
    hidden_size: Count
    products: list[Annotated[list[Any], Field(min_length=3, max_length=3)]] = Field(default_factory=list)
    attention: Annotated[list[CountOrNone], Field(min_length=3, max_length=3)] | None = None
    normed_heads: bool = False
    num_norms: CountOrNone
    activation_width: CountOrNone
    gated: bool
    sliding_window: Count | None = None
    written_out: bool = False

    def shape(self) -> LayerShape:
        """Return it as profiles keep it."""
        attention = None
        if self.attention is not None:
            query_heads, key_value_heads, head_size = self.attention
            attention = Attention(
                query_heads,
                key_value_heads,
                head_size,
                sliding_window=self.sliding_window,
                normed=self.normed_heads,
                written_out=self.written_out,
            )
        return LayerShape(
            kind=self.kind,
            hidden_size=self.hidden_size,
            products=tuple(Product(*each) for each in self.products),
            attention=attention,
            num_norms=self.num_norms,
            activation_width=self.activation_width,
            gated=self.gated,
        )


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


def _is_row(row: Any, width: int) -> TypeGuard[list[float]]:
    return isinstance(row, list) and len(row) == width and all(is_number(value) and value >= 0 for value in row)


class LayerEntry(Entry):
    """Times of a layer."""

    shape: ShapeEntry
    tensor_parallel_size: Count
    recompute: Literal["none", "selective"]
    points: list[Annotated[Any, BeforeValidator(_op_point)]] = Field(min_length=1)


class LinkEntry(Entry):
    """Times of messages."""

    where: Literal["inside", "network"]
    what: Literal["all_reduce", "transfer"]
    num_ranks: Annotated[int, Field(ge=2)]
    ranks_per_node: Count = 1
    flows: Count = 1
    points: list[Annotated[Any, BeforeValidator(_message)]] = Field(min_length=1)


class EngineEntry(Entry):
    """Times of the engine."""

    op_s: NotNegative
    optimizer_s_per_parameter: NotNegative
    iteration_s: NotNegative


class ProfileEntry(Entry):
    """A profile."""

    format: Annotated[str, fixed(FORMAT, "give a file that `terapipe search measure` wrote")]
    device: Text
    accelerator: Text
    num_devices: Count
    num_nodes: Count = 1
    precision: Literal["fp32", "fp16", "bf16"]
    software: dict[str, Any] = Field(default_factory=dict)
    layers: list[LayerEntry] = Field(min_length=1)
    links: list[LinkEntry] = Field(default_factory=list)
    engine: EngineEntry | None = None


def read_profile(path: str) -> Profile:
    """Read a profile."""
    return replace(parse_profile(read_document(path), path), source=path)


def parse_profile(document: object, where: str) -> Profile:
    """Read a profile from the object of a file."""
    entry = read_entry(ProfileEntry, document, where)
    values = dict(entry) | {
        "software": tuple((name, str(version)) for name, version in entry.software.items()),
        "layers": tuple(
            ProfiledLayer(**dict(each) | {"shape": each.shape.shape(), "points": tuple(each.points)})
            for each in entry.layers
        ),
        "links": tuple(ProfiledLink(**dict(each) | {"points": tuple(each.points)}) for each in entry.links),
        "engine": None if entry.engine is None else ProfiledEngine(**dict(entry.engine)),
    }
    del values["format"]
    return Profile(**values)
