"""Profile of a machine, as `measure` writes it: times of ops, of messages, and of the engine around them."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from megatron_terapipe.search.inputs.layer import Layer
from megatron_terapipe.search.op_times.surface import Point

Shape = tuple[Any, ...]
"""Comparable."""


def shape_of(layer: Layer) -> Shape:
    """The shape of a layer, apart from the length of the sequence and what it holds beside products."""
    return (
        layer.kind,
        layer.hidden_size,
        layer.products,
        layer.attention,
        layer.num_norms,
        layer.activation_width,
        layer.gated,
    )


def shape_to_json(shape: Shape) -> dict[str, Any]:
    """The JSON object of a shape."""
    kind, hidden_size, products, attention, num_norms, activation_width, gated = shape
    # What most layers do not have is not in their entries.
    more: dict[str, Any] = {"normed_heads": True} if attention and attention.normed else {}
    if attention and attention.sliding_window is not None:
        more["sliding_window"] = attention.sliding_window
    if attention and attention.written_out:
        more["written_out"] = True
    return {
        "kind": kind,
        "hidden_size": hidden_size,
        "products": [[each.inputs, each.outputs, each.parallel] for each in products],
        "attention": attention and [attention.query_heads, attention.key_value_heads, attention.head_size],
        **more,
        "num_norms": num_norms,
        "activation_width": activation_width,
        "gated": gated,
    }


def shape_in_words(shape: Shape) -> str:
    """For errors."""
    kind, hidden_size, products, attention, *_ = shape
    heads = f", {attention.query_heads} heads" if attention else ""
    if attention and attention.sliding_window is not None:
        heads += f" in a window of {attention.sliding_window}"
    vocabulary = f", {products[0].outputs} outputs" if kind == "head" else ""
    width = f", MLP of {shape[5]}" if kind == "block" else ""
    return f"a {kind} of hidden size {hidden_size}{heads}{width}{vocabulary}"


class OpPoint(NamedTuple):
    """The measured ops of one token slice of one micro-batch, in one layer."""

    micro_batch_size: int
    """Sequences."""
    start: int
    """First token of the token slice."""
    end: int
    """Token behind its last."""
    forward_s: float
    """F."""
    input_gradient_s: float
    """BI."""
    weight_gradient_s: float
    """BW; both together are what the backward takes in one piece."""

    def point(self, op: Literal["forward_s", "input_gradient_s", "weight_gradient_s"]) -> Point:
        """One of the ops."""
        return Point(self.micro_batch_size, self.start, self.end, getattr(self, op))


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledLayer:
    """A layer as one tensor-parallel rank computes it; reductions between ranks are not in the times."""

    shape: Shape
    """Of the whole layer."""
    tensor_parallel_size: int
    """Ranks that share it."""
    recompute: Literal["none", "selective"]
    """`none`, or `selective`."""
    points: tuple[OpPoint, ...]
    """What was measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledLink:
    """Messages of several sizes over one kind of link."""

    where: Literal["inside", "network"]
    """`inside` a node, or over its `network`."""
    what: Literal["all_reduce", "transfer"]
    """`all_reduce` among the ranks of a group, or `transfer` from one to another."""
    num_ranks: int
    """Ranks of a group; 2 for a transfer."""
    points: tuple[tuple[int, float], ...]
    """(bytes, seconds)."""
    ranks_per_node: int = 1
    """How many of them one node has."""
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
    """`fp32`, `fp16` or `bf16`."""
    software: tuple[tuple[str, str], ...]
    """Versions of packages by name."""
    layers: tuple[ProfiledLayer, ...]
    """Times of ops."""
    links: tuple[ProfiledLink, ...] = ()
    """Times of messages."""
    engine: ProfiledEngine | None = None
    """What else an iteration takes; None if it was not measured."""
    num_nodes: int = 1
    """Nodes that took part; with one, nothing was measured of the network."""


def lone_sizes(profile: Profile) -> Iterator[str]:
    """Yield, in words, micro-batches and token slices of which one size alone was measured: all others are a guess."""
    found: dict[str, list[int]] = defaultdict(list)
    for layer in profile.layers:
        if layer.shape[0] == "block" and layer.recompute == "none":
            rows = {point.micro_batch_size for point in layer.points}
            lengths = {point.end - point.start for point in layer.points}
            alone = [f"micro-batches of {size}" for size in rows if len(rows) == 1]
            alone += [f"token slices of {length} tokens" for length in lengths if len(lengths) == 1]
            if alone:
                found[" and ".join(alone)].append(layer.tensor_parallel_size)
    for alone_in_words, sizes in found.items():
        yield f"{alone_in_words} (tensor-parallel size {' and '.join(map(str, sorted(set(sizes))))})"
