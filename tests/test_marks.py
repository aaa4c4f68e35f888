"""A test bears the marks of what it uses, however it gets at it."""

import subprocess
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import distributed
from tests.distributed import run_distributed
from tests.end_to_end import launching
from tests.marks import marks_of


@cache
def trained() -> list[int]:
    return run_distributed(int, 2)


class Launcher:
    @property
    def output(self) -> bytes:
        return subprocess.check_output(["true"])


@given(st.integers())
def a_property(number: int) -> None:
    trained()


WAYS = {"cached": trained}


@pytest.mark.parametrize(
    ("test", "marks"),
    [
        (lambda: len("run_distributed"), set()),
        (lambda: trained(), {"ranks"}),
        (lambda: WAYS["cached"](), {"ranks"}),
        (lambda: distributed.run_distributed(int, 1), {"ranks"}),
        (lambda: [lambda: trained()], {"ranks"}),
        (lambda: Launcher().output, {"launches"}),
        (lambda: launching.launch, {"launches"}),
        (lambda: (torch.compile(int), trained()), {"compiles", "ranks"}),
        (a_property, {"ranks"}),
    ],
)
def test_marks_of_what_a_test_names(test: Callable[..., Any], marks: set[str]) -> None:
    item = SimpleNamespace(function=test, _fixtureinfo=SimpleNamespace(name2fixturedefs={}))
    assert marks_of(item) == marks


def test_marks_of_fixtures_and_parameters() -> None:
    fixtures = SimpleNamespace(name2fixturedefs={"launched": [SimpleNamespace(func=lambda: Launcher())]})
    parameters = SimpleNamespace(params={"way": trained, "number": 3})
    item = SimpleNamespace(function=lambda launched, way: None, _fixtureinfo=fixtures, callspec=parameters)
    assert marks_of(item) == {"launches", "ranks"}
