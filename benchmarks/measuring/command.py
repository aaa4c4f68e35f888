"""Command lines of benchmarks."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial

Parser = partial(argparse.ArgumentParser, formatter_class=argparse.RawDescriptionHelpFormatter)
"""A parser whose description keeps its line breaks."""


def run_named(
    commands: Mapping[str, Callable[[Sequence[str] | None], object]], argv: Sequence[str] | None = None
) -> object:
    """Run the command that the first word names, or the first command where it names none, with the other words."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words.pop(0) if words and words[0] in commands else next(iter(commands))
    return commands[name](words)
