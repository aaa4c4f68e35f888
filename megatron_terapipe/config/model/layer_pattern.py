"""Patterns over the layers of a model, as Megatron writes them: every Nth layer, or a list with an entry for each."""

import ast
import re
import warnings

from megatron_terapipe.errors import ConfigError

_LONGEST = 100_000
"""Entries of a list at most: no model has more layers."""


def layers_of_pattern(pattern: str, num_layers: int, flag: str) -> tuple[bool, ...]:
    """Return for each layer whether the pattern names it.

    A number N names every Nth layer: layers N, 2N, ... counted from 1. A list has a 1 for each layer that it names and
    a 0 for each other; it may be written as a sum and product of lists, `([0]*3+[1])*8`.

    Raises:
        ConfigError: if it is neither, or a list of another length.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of what it doubts in an expression, and then reads it.
            value = _value(ast.parse(pattern.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        value = None
    if isinstance(value, int) and value > 0:
        return tuple((index + 1) % value == 0 for index in range(num_layers))
    if not isinstance(value, list) or not set(value) <= {0, 1}:
        raise ConfigError(
            f"{flag} {pattern} is no pattern of layers: give a number N for every Nth layer, or a list of 0 and 1 such "
            "as ([0]*3+[1])*8"
        )
    if len(value) != num_layers:
        raise ConfigError(
            f"{flag} {pattern} lists {len(value)} layers, but --num-layers is {num_layers}: list each layer once"
        )
    return tuple(entry == 1 for entry in value)


def window_of_megatron(text: str) -> int:
    """Return the tokens that a token attends to, from Megatron's `--window-size`: those before it and those behind it.

    Megatron does not count the token itself.

    Raises:
        ValueError: if these are not two numbers of which the second is 0.
    """
    found = re.fullmatch(r"\(?\s*(\d+)\s*,\s*0\s*\)?", text.strip())
    if found is None:
        raise ValueError(f"{text} is not N,0: give the tokens before a token, and 0 for those behind it")
    return int(found[1]) + 1


def _value(node: ast.expr) -> int | list[int]:
    """Return the value of an expression of whole numbers, lists of them, `+` and `*`.

    Raises:
        ValueError: if it is anything else.
    """
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return number
        case ast.List(elts=entries):
            numbers = [number for number in map(_value, entries) if isinstance(number, int)]
            if len(numbers) == len(entries):
                return numbers
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first, second = _value(left), _value(right)
            if isinstance(first, list) and isinstance(second, list):
                return first + second
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            first, second = _value(left), _value(right)
            listed, times = (first, second) if isinstance(first, list) else (second, first)
            if isinstance(listed, list) and isinstance(times, int) and 0 <= times * max(len(listed), 1) <= _LONGEST:
                return listed * times
    raise ValueError("neither a number nor a list of numbers")
