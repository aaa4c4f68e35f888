"""Settings that all tests share."""

import gc
import os
from typing import Any

# Workers and ranks share the cores. Threads of torch that wait for a core make a product take milliseconds.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.marks import marks_of
from tests.pairs import covering_pairs

# What is imported and collected stays: to look for garbage among it takes a quarter of the time of a collection.
gc.disable()
# No file of a test need outlive the machine: to wait for its disk takes milliseconds each time.
os.fsync = lambda descriptor: None
# A property is about values, not about how busy the machine is.
settings.register_profile("project", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# Who changes one thing is not stopped by what was drawn of another: only `make test-all` draws new values each time.
settings.register_profile("repeated", settings.get_profile("project"), derandomize=True)

# Without a GPU, torch would keep each seed for it, with a trace of all calls on the stack.
seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed

LONGEST = (
    *("test_gpt_equivalence.py", "test_search_then_train.py", "test_faults.py", "test_launched_faults.py"),
    *("test_targets.py", "test_commands.py", "test_lowering_properties.py"),
)
"""Files that take longest, the longest first; files that start ranks run in lanes (tests/lanes.py)."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of the complete tests."""
    more = "run tests marked `thorough`, and every setup, not only enough to cover every pair"
    parser.addoption("--all-setups", action="store_true", help=more)


def pytest_configure(config: pytest.Config) -> None:
    """Choose, before any test is read, whether properties are tried on values that were never drawn before."""
    settings.load_profile("project" if config.getoption("all_setups") else "repeated")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test marked `setups(table, axes)` its argument `setup`: enough to cover every pair of values, or all."""
    marker = metafunc.definition.get_closest_marker("setups")
    if marker:
        table, axes = marker.args
        chosen = range(len(table))
        if not metafunc.config.getoption("all_setups"):
            chosen = covering_pairs([axes(setup) for setup in table])
        metafunc.parametrize("setup", [table[index] for index in chosen], ids=str)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out thorough tests, mark the others by the functions that they use, and sort the longest files first."""
    if not config.getoption("all_setups"):
        thorough = [item for item in items if item.get_closest_marker("thorough")]
        config.hook.pytest_deselected(items=thorough)
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]
    for item in items:
        if isinstance(item, pytest.Function):
            for mark in sorted(marks_of(item)):
                item.add_marker(mark)
    place = {name: index for index, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(LONGEST)))


def pytest_collection_finish() -> None:
    """Collect garbage from here on, of what tests make."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Let each test draw the same weights, whichever tests ran before it on its worker."""
    seed(0)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run what starts ranks in lanes."""
    from tests.lanes import Lanes

    return Lanes(config, log)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the seconds of each folder beside its budget, where several workers ran tests."""
    if getattr(config.option, "numprocesses", None):
        from tests.lanes import beside_budget, seconds_by_folder

        reports = [each for kind in terminalreporter.stats.values() for each in kind if hasattr(each, "duration")]
        terminalreporter.section("seconds of workers by folder")
        for line in beside_budget(seconds_by_folder(reports)):
            terminalreporter.write_line(line)


@pytest.fixture
def all_setups(request: pytest.FixtureRequest) -> bool:
    """Whether to run everything, however long it takes."""
    return bool(request.config.getoption("all_setups"))


@pytest.fixture(scope="module")
def setups(request: pytest.FixtureRequest) -> list[Any]:
    """Every `setup` that a test of this file is about to run with, once: what ranks have to be asked for."""
    here = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    return list(dict.fromkeys(item.callspec.params["setup"] for item in here if "setup" in item.callspec.params))
