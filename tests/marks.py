"""Marks of tests by the functions that they use.

A test has the mark of functions that it reaches: through the functions and classes of tests and benchmarks, through its
fixtures and its parameters. Processes that the code of the packages starts are not found.
"""

import multiprocessing
import subprocess
from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest
import torch

from deepspeed_ext.plan.solve.list_scheduler import list_schedule
from deepspeed_ext.plan.solve.orders import optimise
from deepspeed_ext.pointwise import Pointwise
from tests.distributed import run_distributed

REACHING = {
    "ranks": (run_distributed, multiprocessing.get_context, multiprocessing.Process),
    "launches": (subprocess.run, subprocess.Popen, subprocess.check_output),
    "compiles": (torch.compile, Pointwise, optimise, list_schedule),
}
"""Functions by mark; a test that reaches one has the mark."""


def marks_of(item: pytest.Function) -> set[str]:
    """Marks of a collected test."""
    fixtures = [each.func for found in item._fixtureinfo.name2fixturedefs.values() for each in found[-1:]]
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return set().union(*(_marks(each) for each in (item.function, *fixtures, *parameters) if _is_followed(each)))


@cache
def _marks(start: Any) -> frozenset[str]:
    reached, left = {}, [start]
    while left:
        each = left.pop()
        if id(each) not in reached:
            reached[id(each)] = each
            if _is_followed(each):
                left += _used_by(each)
    return frozenset(mark for mark, signs in REACHING.items() if any(id(sign) in reached for sign in signs))


def _is_followed(value: Any) -> bool:
    """Whether to look into something: functions and classes of tests and benchmarks, whatever decorates them."""
    module = str(getattr(value, "__module__", ""))
    return callable(value) and module.startswith(("tests.", "benchmarks.")) and value.__hash__ is not None


def _used_by(value: Any) -> Iterator[Any]:
    """Values that a function or class names, as far as they are found without running it."""
    value = (getattr(value, "hypothesis", None) and value.hypothesis.inner_test) or value
    value = getattr(value, "__wrapped__", value)
    if isinstance(value, type):
        yield from value.__mro__[1:]
        for member in vars(value).values():
            yield getattr(member, "fget", None) or getattr(member, "func", None) or getattr(member, "__func__", member)
    elif isinstance(value, FunctionType):
        names = set(_names(value.__code__))
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != type(cell)()]
        for found in [*cells, *(value.__globals__[name] for name in names if name in value.__globals__)]:
            yield found
            if isinstance(found, ModuleType):
                yield from (vars(found)[name] for name in names if name in vars(found))
            elif isinstance(found, dict | list | tuple):
                yield from found.values() if isinstance(found, dict) else found


def _names(code: CodeType) -> Iterator[str]:
    """Names that a function reads, and those of functions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
