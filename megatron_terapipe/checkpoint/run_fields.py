"""The rules that the fields of `run.json` keep, one line for each that is broken. Needs no torch."""

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from deepspeed_ext.plan.layout import ParallelLayout
from megatron_terapipe.config import ModelConfig
from megatron_terapipe.errors import UserError
from megatron_terapipe.huggingface.families.registry import FAMILIES

MOST_ITERATIONS = 10**9
MOST_SAMPLES_OF_AN_ITERATION = 10**9
MOST_RANKS = 10**6
"""Beyond these a number is damage and no run."""
_ADDED_SIZES = {"sequence_parallel_size"}
"""Sizes of a layout that checkpoints of earlier versions do not name; they were 1."""
_SHOWN = 40
"""Characters of a wrong value that a line shows."""


def check_run(found: Mapping[str, Any]) -> None:
    """Hold every field against its rule.

    Raises:
        ValueError: naming the first field that breaks its rule.
    """
    iteration = _whole(found, "iteration", 0, MOST_ITERATIONS)
    # Each iteration trains on one sample at least.
    samples = _whole(found, "consumed_samples", iteration, iteration * MOST_SAMPLES_OF_AN_ITERATION)
    _whole(found, "skipped_iterations", 0, iteration)
    _whole(found, "skipped_samples", 0, samples)
    _whole(found, "vocabulary_parts", 1, MOST_RANKS)
    for name in ("partitioned", "has_manifest"):
        if not isinstance(found[name], bool):
            raise _wrong(name, found[name], "true or false")
    for name in ("optimizer", "family"):
        if found[name] is not None and not isinstance(found[name], str):
            raise _wrong(name, found[name], "a name or null")
    if found["family"] is not None and found["family"] not in FAMILIES:
        raise _wrong("family", found["family"], "a family that this version knows")
    _check_layout(found["layout"])
    _check_model(found["model"])
    _check_tokenizer(found["tokenizer"])


def _whole(found: Mapping[str, Any], name: str, least: int, most: int, prefix: str = "") -> int:
    value = found[name]
    if type(value) is not int or not least <= value <= most:
        raise _wrong(f"{prefix}{name}", value, f"a whole number from {least} to {most}")
    return value


def _check_layout(layout: object) -> None:
    names = [each.name for each in fields(ParallelLayout)]
    if not isinstance(layout, dict) or set(layout) | _ADDED_SIZES != set(names):
        raise _wrong("layout", layout, f"an object with {', '.join(names)}")
    ranks = 1
    for name in layout:
        size = _whole(layout, name, 1, MOST_RANKS, "layout.")
        # Token slices are time, and not ranks.
        ranks *= 1 if name == "num_token_slices" else size
    if ranks > MOST_RANKS:
        raise _wrong("layout", layout, f"of {MOST_RANKS} ranks at most")


def _check_model(model: object) -> None:
    needed = [each.name for each in fields(ModelConfig) if each.default is MISSING]
    if not isinstance(model, dict) or not set(needed) <= set(model):
        raise _wrong("model", model, f"an object with {', '.join(needed)} and more")
    hints = get_type_hints(ModelConfig)
    for name, value in model.items():
        if name in hints and not _fits(value, hints[name]):
            raise _wrong(f"model.{name}", value, "of another type")
    try:
        ModelConfig(**{name: value for name, value in model.items() if name in hints})
    except (UserError, ArithmeticError) as error:  # The latter of numbers that no model has.
        raise ValueError(f"model: {error}") from None


def _check_tokenizer(tokenizer: object) -> None:
    if not isinstance(tokenizer, dict):
        raise _wrong("tokenizer", tokenizer, "an object")
    for name, value in tokenizer.items():
        words = value if isinstance(value, list) else [value]
        if isinstance(value, bool) or not all(isinstance(each, str | int | None) for each in words):
            raise _wrong(f"tokenizer.{name}", value, "a text, a whole number, a list or null")


def _fits(value: object, hint: Any) -> bool:
    """Whether a value as JSON has it may stand in a field of a type."""
    if isinstance(hint, UnionType):
        return any(_fits(value, each) for each in get_args(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
    return hint in (int, str, bool, type(None)) and type(value) is hint


def _wrong(name: str, value: object, rule: str) -> ValueError:
    shown = repr(value)
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    return ValueError(f"{name} is {shown}, and must be {rule}")
