"""Marks follow from the functions that a test uses; the setups of a commit have every pair of values of all setups."""

import subprocess
from collections.abc import Callable
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import distributed
from tests.distributed import run_distributed
from tests.end_to_end import launching
from tests.lanes import BUDGET_S, ROOT, beside_budget, lane, seconds_by_folder, starts_ranks
from tests.marks import marks_of
from tests.pairs import covering_pairs, pairs_of


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
def test_marks_follow_from_names(test: Callable[..., Any], marks: set[str]) -> None:
    item = SimpleNamespace(function=test, _fixtureinfo=SimpleNamespace(name2fixturedefs={}))
    assert marks_of(item) == marks


def test_marks_of_fixtures_and_parameters() -> None:
    fixtures = SimpleNamespace(name2fixturedefs={"launched": [SimpleNamespace(func=lambda: Launcher())]})
    parameters = SimpleNamespace(params={"way": trained, "number": 3})
    item = SimpleNamespace(function=lambda launched, way: None, _fixtureinfo=fixtures, callspec=parameters)
    assert marks_of(item) == {"launches", "ranks"}


tables = st.lists(st.fixed_dictionaries({axis: st.integers(0, 2) for axis in "abcd"}), min_size=1, max_size=30)


@given(tables)
def test_no_pair_is_lost_and_no_setup_is_superfluous(table: list[dict[str, int]]) -> None:
    chosen = [pairs_of(table[index]) for index in covering_pairs(table)]
    assert set().union(*chosen) == set().union(*map(pairs_of, table))
    for number in range(len(chosen)):
        others = chosen[:number] + chosen[number + 1 :]
        assert chosen[number] - set().union(*others)


def test_few_of_a_full_product_are_enough() -> None:
    table = [dict(zip("abcdefgh", values, strict=True)) for values in product((0, 1), repeat=8)]
    assert len(covering_pairs(table)) <= 8


def test_a_lane_has_the_files_that_start_ranks() -> None:
    assert starts_ranks("tests/model/test_on_ranks.py")
    assert not starts_ranks("tests/model/test_rotary.py")
    files = ("tests/model/test_on_ranks.py", "tests/runtime/test_shapes.py", "tests/training/test_step.py")
    assert [len({lane(file, workers) for file in files}) for workers in (2, 3, 8)] == [1, 2, 3]


def test_a_folder_above_its_budget_is_named() -> None:
    assert all((ROOT / "tests" / folder).is_dir() for folder in BUDGET_S)
    reports = [
        SimpleNamespace(nodeid=f"tests/{name}::test", duration=duration)
        for name, duration in (("plan/test_a.py", 999.0), ("plan/solve/test_b.py", 0.4), ("test_c.py", 2.0))
    ]
    seconds = seconds_by_folder(reports)
    assert seconds == {"plan": 999.4, "": 2.0}
    of_plan, of_files = beside_budget(seconds)[1:-1]
    assert of_plan.split() == ["999", str(BUDGET_S["plan"]), "tests/plan", "OVER", "ITS", "BUDGET"]
    assert of_files.split() == ["2", "tests/"]
