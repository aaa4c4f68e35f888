"""All parsers under fuzzing."""

from importlib import import_module

from tests.faults.fuzzing.target import Target

MODULES = ("checkpoints", "configuration", "data", "plan", "reports", "search")
"""Modules of this folder; each has its parsers in `TARGETS`."""


def target(name: str) -> Target:
    """Return a parser by its name, and import no more than is needed to find it."""
    for module in MODULES:
        for each in _targets(module):
            if each.name == name:
                return each
    raise KeyError(name)


def targets() -> tuple[Target, ...]:
    """Return all parsers."""
    return tuple(each for module in MODULES for each in _targets(module))


def _targets(module: str) -> tuple[Target, ...]:
    found: tuple[Target, ...] = import_module(f"{__name__}.{module}").TARGETS
    return found
