"""Profiles as files: `measure` writes them, `--profile` reads them."""

import json
import re
from dataclasses import asdict, replace
from typing import Annotated, Any, Literal, TypeGuard

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
from megatron_terapipe.search.price.profile import (
    OpPoint,
    Profile,
    ProfiledEngine,
    ProfiledLayer,
    ProfiledLink,
    Shape,
    shape_to_json,
)
from megatron_terapipe.search.price.workload import Attention, LayerKind, Product

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
                "shape": shape_to_json(layer.shape),
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
    write_json(path, _points_on_lines(text))


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

    def shape(self) -> Shape:
        """Return it as profiles keep it."""
        products = tuple(Product(*each) for each in self.products)
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
        sizes = self.num_norms, self.activation_width, self.gated
        return (self.kind, self.hidden_size, products, attention, *sizes)


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
    return Profile(
        device=entry.device,
        accelerator=entry.accelerator,
        num_devices=entry.num_devices,
        num_nodes=entry.num_nodes,
        precision=entry.precision,
        software=tuple((name, str(version)) for name, version in entry.software.items()),
        layers=tuple(
            ProfiledLayer(
                shape=each.shape.shape(),
                tensor_parallel_size=each.tensor_parallel_size,
                recompute=each.recompute,
                points=tuple(each.points),
            )
            for each in entry.layers
        ),
        links=tuple(
            ProfiledLink(
                where=each.where,
                what=each.what,
                num_ranks=each.num_ranks,
                points=tuple(each.points),
                ranks_per_node=each.ranks_per_node,
                flows=each.flows,
            )
            for each in entry.links
        ),
        engine=None if entry.engine is None else ProfiledEngine(**entry.engine.model_dump()),
    )


def _points_on_lines(text: str) -> str:
    """Put lists of numbers, which `json` spreads over many lines, on one."""
    return NUMBERS.sub(lambda found: "[" + " ".join(found[1].split()) + "]", text)
