"""Flags that pin dimensions of the space: a value, or several with commas between them."""

import argparse
from collections.abc import Callable
from typing import Any

from deepspeed_ext.plan.schedules import SCHEDULES
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.space.choices import RECOMPUTE, SOLVED

Parse = Callable[[str, str], tuple[Any, ...]]


def add_constraint_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each dimension."""
    group = parser.add_argument_group(
        "what to search", "A dimension without a flag is free. Give one value to fix it, or the values to try: 1,2,4"
    )
    for name, (_, metavar, words) in CONSTRAINTS.items():
        group.add_argument(flag(name), metavar=metavar, help=words)


def constraints_of(options: argparse.Namespace) -> dict[str, tuple[Any, ...]]:
    """Values of the dimensions that flags pin, by name.

    Raises:
        ConfigError: if a value is none of its dimension.
    """
    pins = {}
    for name, (parse, _, _) in CONSTRAINTS.items():
        text = getattr(options, name)
        if text is not None:
            pins[name] = parse(text, flag(name))
    return pins


def flag(name: str) -> str:
    """The flag of a dimension."""
    return f"--{name.replace('_', '-')}"


def _numbers(least: int, most: int | None = None) -> Parse:
    def parse(text: str, name: str) -> tuple[int, ...]:
        try:
            values = tuple(int(part) for part in text.split(","))
        except ValueError:
            values = ()
        if not values or min(values) < least or (most is not None and max(values) > most):
            upto = f"from {least}" if most is None else f"from {least} to {most}"
            raise ConfigError(
                f"{name} {text} is not whole numbers {upto} with commas between them: write {least},{least + 1}"
            )
        return tuple(dict.fromkeys(values))

    return parse


def _lengths(text: str, name: str) -> tuple[int, ...]:
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or min(values) < 1:
        raise ConfigError(f"{name} {text} is not lengths with commas between them: write 704,688,656")
    return values


def _words(choices: tuple[str, ...]) -> Parse:
    def parse(text: str, name: str) -> tuple[str, ...]:
        values = tuple(part.strip() for part in text.split(","))
        for value in values:
            if value not in choices:
                raise ConfigError(f"{name} {value} is not known: choose among {', '.join(choices)}")
        return tuple(dict.fromkeys(values))

    return parse


def _switch(text: str, name: str) -> tuple[bool, ...]:
    found = _words(("off", "on"))(text, name)
    return tuple(value == "on" for value in found)


def _partition(text: str, name: str) -> tuple[str | tuple[int, ...], ...]:
    if not text[:1].isdigit():
        return _words(("uniform", "parameters", SOLVED))(text, name)
    bounds = _numbers(0)(text, name)
    return (bounds,)


CONSTRAINTS: dict[str, tuple[Parse, str, str]] = {
    "data_parallel_size": (_numbers(1), "LIST", "data-parallel sizes"),
    "tensor_parallel_size": (_numbers(1), "LIST", "tensor-parallel sizes"),
    "pipeline_parallel_size": (_numbers(1), "LIST", "pipeline-parallel sizes"),
    "num_model_chunks": (_numbers(1), "LIST", "model chunks, the stages of each pipeline rank"),
    "micro_batch_size": (_numbers(1), "LIST", "micro-batch sizes"),
    "num_token_slices": (_numbers(1), "LIST", "numbers of token slices; 1 leaves sequences whole"),
    "token_slices": (_lengths, "LENGTHS", "lengths of the token slices: 704,688,656"),
    "schedule": (_words(tuple(SCHEDULES)), "LIST", f"schedules among {', '.join(SCHEDULES)}"),
    "recompute": (_words(RECOMPUTE), "LIST", f"recomputation among {', '.join(RECOMPUTE)}"),
    "zero_stage": (_numbers(0, 1), "LIST", "ZeRO stages, 0 or 1"),
    "sequence_parallel": (_switch, "LIST", "sequence parallelism: off, on"),
    "stage_partition": (
        _partition,
        "LIST",
        f"rules among uniform, parameters, {SOLVED}; or the bounds of one partition: 0,5,12",
    ),
}
"""Parser, placeholder and help of each dimension."""
