"""Profiles as files: `measure` writes them, `--profile` reads them."""

import json
import re
from dataclasses import asdict
from typing import Any

from deepspeed_ext.plan.text_files import write_text
from megatron_terapipe.search.inputs.documents import Fields, read_document
from megatron_terapipe.search.op_times.profile import (
    OpPoint,
    Profile,
    ProfiledEngine,
    ProfiledLayer,
    ProfiledLink,
    shape_from_json,
    shape_to_json,
)

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
    """Write a profile, each point on a line of its own.

    Raises:
        UserError: if the file cannot be written.
    """
    text = json.dumps(profile_to_json(profile), indent=1)
    write_text(path, _points_on_lines(text) + "\n", "--json")


def read_profile(path: str) -> Profile:
    """Read a profile.

    Raises:
        ConfigError: if it cannot be read, or a field is wrong; one line with file, field, value and remedy.
    """
    fields = Fields(read_document(path), path)
    if fields.raw("format") != FORMAT:
        raise fields.fault("format", f"is not {FORMAT}", "give a file that the command measure wrote")
    versions = fields.raw("software") or {}
    layers = tuple(_layer(each) for each in fields.sections("layers"))
    links = tuple(_link(each) for each in fields.sections("links")) if fields.raw("links") else ()
    profile = Profile(
        source=path,
        device=fields.text("device"),
        accelerator=fields.text("accelerator"),
        num_devices=fields.whole("num_devices"),
        precision=fields.choice("precision", ("fp32", "fp16", "bf16")),
        software=tuple((str(name), str(version)) for name, version in dict(versions).items()),
        layers=layers,
        links=links,
        engine=_engine(fields.section("engine")) if fields.has("engine") else None,
    )
    fields.finish()
    return profile


def _layer(fields: Fields) -> ProfiledLayer:
    layer = ProfiledLayer(
        shape=shape_from_json(fields.section("shape")),
        tensor_parallel_size=fields.whole("tensor_parallel_size"),
        recompute=fields.choice("recompute", ("none", "selective")),  # type: ignore[arg-type]
        points=tuple(_op_point(fields, row) for row in _rows(fields, 6, POINT)),
    )
    fields.finish()
    return layer


def _link(fields: Fields) -> ProfiledLink:
    rows = _rows(fields, 2, "[bytes, seconds]")
    link = ProfiledLink(
        where=fields.choice("where", ("inside", "network")),  # type: ignore[arg-type]
        what=fields.choice("what", ("all_reduce", "transfer")),  # type: ignore[arg-type]
        num_ranks=fields.whole("num_ranks", least=2),
        points=tuple((int(num_bytes), float(seconds)) for num_bytes, seconds in rows),
    )
    fields.finish()
    return link


def _engine(fields: Fields) -> ProfiledEngine:
    engine = ProfiledEngine(
        op_s=fields.number("op_s", above=False),
        optimizer_s_per_parameter=fields.number("optimizer_s_per_parameter", above=False),
        iteration_s=fields.number("iteration_s", above=False),
    )
    fields.finish()
    return engine


def _rows(fields: Fields, width: int, wanted: str) -> list[list[float]]:
    rows = fields.raw("points")
    if not isinstance(rows, list) or not rows:
        raise fields.fault("points", "is not a list of measured points", f"write {wanted} for each")
    for row in rows:
        numbers = isinstance(row, list) and all(_is_number(value) for value in row)
        if not numbers or len(row) != width or min(row) < 0:
            raise fields.fault("points", f"has an entry that is not {wanted}, none below 0", "measure again")
    return rows


def _op_point(fields: Fields, row: list[float]) -> OpPoint:
    size, start, end, *seconds = row
    if any(value != int(value) for value in (size, start, end)) or size < 1 or not start < end:
        raise fields.fault("points", f"has an entry {row} whose token slice or micro-batch is empty", "measure again")
    return OpPoint(int(size), int(start), int(end), *seconds)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _points_on_lines(text: str) -> str:
    """Put lists of numbers, which `json` spreads over many lines, on one."""
    return NUMBERS.sub(lambda found: "[" + " ".join(found[1].split()) + "]", text)
