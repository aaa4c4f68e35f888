"""Plans, flags and help load at once, also where only Python is installed."""

import subprocess
import sys

import pytest

from tests.architecture.sources import ROOT, modules

HEAVY = {"torch", "deepspeed", "numpy", "numba", "tokenizers", "tqdm", "packaging", "pydantic", "yaml"}
LIGHT = (
    "deepspeed_ext.plan",
    "deepspeed_ext.runtime.cuda_environment",
    "deepspeed_ext.runtime.launch",
    "deepspeed_ext.runtime.health.processes",
    "deepspeed_ext.runtime.health.rank_watch",
    "deepspeed_ext.runtime.health.stall",
    "megatron_terapipe.config",
    "megatron_terapipe.strategy",
    "megatron_terapipe.arguments",
    "megatron_terapipe.planning",
    "megatron_terapipe.training.first_rank",
    "megatron_terapipe.training.pretrain",
    "megatron_terapipe.generate",
    "megatron_terapipe.convert",
    "megatron_terapipe.neox",
    "megatron_terapipe.command",
    "megatron_terapipe.run_report.__main__",
    "megatron_terapipe.run_report.own_report",
    "megatron_terapipe.search.__main__",
    "megatron_terapipe.search.answer.flags",
    "megatron_terapipe.doctor.__main__",
    "megatron_terapipe.doctor.probe",
    "pretrain_gpt",
)
"""Modules, each with all in it."""
SOLVERS = (
    "deepspeed_ext.plan.solve",
    *(f"deepspeed_ext.plan.simulate.{name}" for name in ("arrays", "compiled", "host_copies", "loop")),
)
"""Light packages' modules that load numpy: imported where something is solved, simulated many times or offloaded."""


def light_modules() -> list[str]:
    """Every module that must start at once."""
    return [module for module in modules() if _is_in(module, LIGHT) and not _is_in(module, SOLVERS)]


def _is_in(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def packages_loaded(module: str) -> set[str]:
    """Packages of others that a fresh interpreter has loaded once it has imported a module."""
    program = f"import sys; import {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    # -I: without the directory of the tests or variables of the environment; the project is put on the path by hand.
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); {program}"
    result = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=True)
    return set(result.stdout.split()) & HEAVY


def test_every_light_module_together() -> None:
    # One interpreter for all of them; on failure the test below is the way to find out which.
    assert not packages_loaded(", ".join(light_modules()))


@pytest.mark.parametrize("module", ["deepspeed_ext.plan.schedules", "megatron_terapipe.config", "pretrain_gpt"])
def test_one_module(module: str) -> None:
    assert not packages_loaded(module)


def test_loaded_packages_are_found() -> None:
    assert packages_loaded("numpy") == {"numpy"}
