"""Who may import whom: the table of CONTRIBUTING.md, in full."""

import sys
from dataclasses import dataclass
from fnmatch import fnmatchcase
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.architecture.sources import imported_when_importing, imports_of, modules, where

PLAN = ("deepspeed_ext.plan",)
CONFIG = ("megatron_terapipe.config", "megatron_terapipe.errors")
SEARCH_INPUTS = (
    *(*PLAN, *CONFIG, "megatron_terapipe.strategy"),
    *(f"megatron_terapipe.search.{part}" for part in ("reading", "workload", "cluster", "software", "prediction")),
)
SEARCH_PRICES = tuple(f"megatron_terapipe.search.{part}" for part in ("cost", "memory", "profile"))


@dataclass(frozen=True)
class Layer:
    """Modules that may import the same.

    Attributes:
        modules: patterns of their names. A module belongs to the longest pattern that fits it.
        ours: modules of ours they may import with all in them, besides those of their own row.
        packages: packages of others, or modules of such. The standard library is everybody's.
    """

    modules: tuple[str, ...]
    ours: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()


LAYERS = (
    Layer(("deepspeed_ext", "megatron_terapipe")),
    Layer(("deepspeed_ext.plan", "deepspeed_ext.plan.*"), packages=("numpy", "numba")),
    Layer(("megatron_terapipe.errors",), PLAN),
    Layer(("megatron_terapipe.refused_flags", "megatron_terapipe.accepted_flags")),
    Layer(("megatron_terapipe.command_parser",), ("megatron_terapipe.errors",)),
    # The arrow to the configuration is for types alone: the configuration counts FLOPs, so the other way is taken.
    Layer(
        ("megatron_terapipe.model", "megatron_terapipe.model.flops"),
        ("megatron_terapipe.config.model", "megatron_terapipe.config.block_shape"),
    ),
    Layer(
        ("megatron_terapipe.config", "megatron_terapipe.config.*"),
        (*PLAN, "megatron_terapipe.errors", "megatron_terapipe.model.flops"),
        ("numpy",),
    ),
    Layer(("megatron_terapipe.strategy",), (*PLAN, *CONFIG)),
    Layer(
        (
            "megatron_terapipe.checkpoint",
            "megatron_terapipe.checkpoint.info",
            "megatron_terapipe.checkpoint.files",
            "megatron_terapipe.checkpoint.directories",
        ),
        (*PLAN, *CONFIG),
    ),
    Layer(
        ("megatron_terapipe.arguments", "megatron_terapipe.arguments.*"),
        (
            *PLAN,
            *CONFIG,
            "megatron_terapipe.checkpoint.info",
            "megatron_terapipe.checkpoint.directories",
            "megatron_terapipe.strategy",
            "megatron_terapipe.refused_flags",
            "megatron_terapipe.accepted_flags",
        ),
    ),
    Layer(
        ("megatron_terapipe.neox", "megatron_terapipe.neox.*"),
        (*PLAN, *CONFIG, "megatron_terapipe.command_parser"),
        ("yaml",),
    ),
    Layer(("deepspeed_ext.pointwise",), PLAN, ("torch", "deepspeed")),
    Layer(
        ("deepspeed_ext.runtime", "deepspeed_ext.runtime.*"),
        (*PLAN, "deepspeed_ext.pointwise"),
        ("torch", "deepspeed", "packaging"),
    ),
    Layer(("megatron_terapipe.tensor_parallel", "megatron_terapipe.tensor_parallel.*"), packages=("torch",)),
    Layer(
        ("megatron_terapipe.model.*",),
        (
            *(*PLAN, *CONFIG, "deepspeed_ext.pointwise", "megatron_terapipe.model.flops"),
            "megatron_terapipe.tensor_parallel",
        ),
        ("torch",),
    ),
    Layer(
        ("megatron_terapipe.model.gpt",),
        (*PLAN, *CONFIG, "megatron_terapipe.model", "megatron_terapipe.tensor_parallel"),
        ("torch", "deepspeed.pipe"),
    ),
    Layer(
        ("megatron_terapipe.data", "megatron_terapipe.data.*"),
        (*PLAN, *CONFIG, "megatron_terapipe.command_parser"),
        ("torch", "numpy", "regex", "tqdm", "tokenizers", "sentencepiece", "zstandard"),
    ),
    Layer(
        ("megatron_terapipe.checkpoint.*",),
        (*PLAN, *CONFIG, "deepspeed_ext.runtime", "megatron_terapipe.model", "megatron_terapipe.checkpoint"),
        ("torch", "deepspeed.pipe"),
    ),
    Layer(
        ("megatron_terapipe.inference", "megatron_terapipe.inference.*"),
        (
            *(*PLAN, *CONFIG, "deepspeed_ext.runtime", "megatron_terapipe.model", "megatron_terapipe.data"),
            "megatron_terapipe.checkpoint",
        ),
        ("torch", "deepspeed.pipe"),
    ),
    Layer(
        ("megatron_terapipe.huggingface", "megatron_terapipe.huggingface.*"),
        (
            *(*PLAN, *CONFIG, "deepspeed_ext.runtime", "megatron_terapipe.model", "megatron_terapipe.checkpoint"),
            "megatron_terapipe.inference",
        ),
        ("torch",),
    ),
    Layer(
        ("megatron_terapipe.training", "megatron_terapipe.training.*"),
        (
            "deepspeed_ext.pointwise",
            *(*PLAN, *CONFIG, "deepspeed_ext.runtime", "megatron_terapipe.model", "megatron_terapipe.data"),
            "megatron_terapipe.checkpoint",
            "megatron_terapipe.tensor_parallel",
        ),
        ("torch", "deepspeed", "numpy", "tqdm", "pydantic"),
    ),
    # The search, bottom first. scipy, rich, yaml and pyarrow are imported within functions: it must start at once.
    Layer(("megatron_terapipe.search",)),
    Layer(("megatron_terapipe.search.reading", "megatron_terapipe.search.reading.*"), (*PLAN, *CONFIG), ("yaml",)),
    Layer(
        ("megatron_terapipe.search.workload", "megatron_terapipe.search.workload.*"),
        (*PLAN, *CONFIG, "megatron_terapipe.model.flops", "megatron_terapipe.search.reading"),
        ("yaml",),
    ),
    Layer(
        ("megatron_terapipe.search.cluster", "megatron_terapipe.search.cluster.*"),
        (*PLAN, *CONFIG, "megatron_terapipe.search.reading"),
        ("numpy", "yaml"),
    ),
    Layer(
        ("megatron_terapipe.search.software", "megatron_terapipe.search.prediction"),
        (*PLAN, "megatron_terapipe.model.flops"),
    ),
    Layer(
        ("megatron_terapipe.search.cost", "megatron_terapipe.search.cost.*"),
        (*SEARCH_INPUTS, "megatron_terapipe.model.flops"),
        ("numpy", "pyarrow", "aiconfigurator_core"),
    ),
    Layer(
        ("megatron_terapipe.search.memory", "megatron_terapipe.search.memory.*"),
        (*SEARCH_INPUTS, "megatron_terapipe.model.flops"),
        ("numpy",),
    ),
    Layer(
        ("megatron_terapipe.search.profile", "megatron_terapipe.search.profile.*"),
        (*SEARCH_INPUTS, "megatron_terapipe.search.cost"),
        ("numpy", "scipy"),
    ),
    Layer(
        ("megatron_terapipe.search.trials", "megatron_terapipe.search.trials.*"),
        SEARCH_INPUTS,
        ("numpy",),
    ),
    Layer(
        ("megatron_terapipe.search.calibrate", "megatron_terapipe.search.calibrate.*"),
        (*SEARCH_INPUTS, *SEARCH_PRICES, "megatron_terapipe.search.trials"),
        ("numpy", "scipy"),
    ),
    Layer(
        ("megatron_terapipe.search.pricing",),
        (*SEARCH_INPUTS, *SEARCH_PRICES, "megatron_terapipe.search.calibrate"),
        ("numpy",),
    ),
    Layer(
        ("megatron_terapipe.search.solve", "megatron_terapipe.search.solve.*"),
        (*SEARCH_INPUTS, *SEARCH_PRICES, "megatron_terapipe.search.pricing"),
        ("numpy", "numba"),
    ),
    Layer(
        (
            "megatron_terapipe.search.space",
            "megatron_terapipe.search.space.*",
            "megatron_terapipe.search.ranking",
            "megatron_terapipe.search.ranking.*",
        ),
        (
            *(*SEARCH_INPUTS, *SEARCH_PRICES, "megatron_terapipe.search.pricing", "megatron_terapipe.search.solve"),
            "megatron_terapipe.search.calibrate",
        ),
        ("numpy", "tqdm"),
    ),
    Layer(
        ("megatron_terapipe.search.report", "megatron_terapipe.search.report.*"),
        (
            *(*SEARCH_INPUTS, *SEARCH_PRICES, "megatron_terapipe.search.pricing", "megatron_terapipe.search.ranking"),
            "megatron_terapipe.search.space",
        ),
        ("numpy", "rich"),
    ),
    Layer(
        ("megatron_terapipe.search.validation", "megatron_terapipe.search.validation.*"),
        (
            *(*SEARCH_INPUTS, *SEARCH_PRICES, "megatron_terapipe.search.pricing", "megatron_terapipe.search.trials"),
            *("megatron_terapipe.search.calibrate", "megatron_terapipe.model.flops"),
        ),
        ("numpy", "rich"),
    ),
    # Commands put the parts together: they may import anything of ours, and nobody imports them.
    Layer(
        (
            "pretrain_gpt",
            "megatron_terapipe.generate",
            "megatron_terapipe.convert",
            "megatron_terapipe.neox.__main__",
            "megatron_terapipe.search.__main__",
            "megatron_terapipe.search.command",
            "megatron_terapipe.search.command.*",
            "megatron_terapipe.search.measure*",
            "megatron_terapipe.search.trial",
            "megatron_terapipe.search.trial_*",
        ),
        ("deepspeed_ext", "megatron_terapipe"),
        ("torch", "deepspeed", "numpy", "tqdm", "rich", "yaml"),
    ),
    Layer(("setup",), packages=("setuptools",)),
)
"""Bottom first."""


def height(module: str) -> int:
    """The layer of a module."""
    fitting = [
        (len(pattern), index)
        for index, layer in enumerate(LAYERS)
        for pattern in layer.modules
        if fnmatchcase(module, pattern)
    ]
    assert fitting, f"{module} has no layer: put it into the table of this test"
    return max(fitting)[1]


def allows(layer: Layer, target: str) -> bool:
    """Whether modules of a layer may import a module."""
    if target.split(".")[0] in sys.stdlib_module_names:
        return True
    if target in modules() and LAYERS[height(target)] == layer:
        return True
    return any(target == name or target.startswith(f"{name}.") for name in (*layer.ours, *layer.packages))


def test_modules_import_what_their_layer_may() -> None:
    forbidden = [
        f"{where(path, each.line)} imports {each.target}"
        for module, path in modules().items()
        for each in imports_of(path)
        if not allows(LAYERS[height(module)], each.target)
    ]
    assert not forbidden, "\n".join(forbidden)


def test_arrows_point_down() -> None:
    upward = [
        f"{module} imports {other}, which stands above it"
        for module in modules()
        for other in imported_when_importing(module)
        if height(other) > height(module)
    ]
    assert not upward, "\n".join(upward)


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    try:
        TopologicalSorter({module: imported_when_importing(module) for module in modules()}).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_the_walk_sees_what_it_should() -> None:
    assert "megatron_terapipe.model.flops" in imported_when_importing("megatron_terapipe.config.balance")
    # For types alone, and within a function.
    assert not imported_when_importing("megatron_terapipe.model.flops")
    assert "megatron_terapipe.training.trainer" not in imported_when_importing("pretrain_gpt")
    assert any(each.target == "megatron_terapipe.training.trainer" for each in imports_of(modules()["pretrain_gpt"]))
    # A package runs before what is in it.
    assert "megatron_terapipe.config" in imported_when_importing("megatron_terapipe.strategy")


@pytest.mark.parametrize(
    ("module", "target", "allowed"),
    [
        ("deepspeed_ext.plan.ops", "math", True),
        ("deepspeed_ext.plan.ops", "torch", False),
        ("deepspeed_ext.plan.ops", "deepspeed_ext.runtime.batch", False),
        ("deepspeed_ext.runtime.engine", "megatron_terapipe.errors", False),
        ("megatron_terapipe.config.config", "megatron_terapipe.model.flops", True),
        ("megatron_terapipe.config.config", "megatron_terapipe.model.gpt", False),
        ("megatron_terapipe.model.block", "deepspeed.pipe", False),
        ("megatron_terapipe.model.gpt", "deepspeed.pipe", True),
        ("megatron_terapipe.model.block", "megatron_terapipe.tensor_parallel.ranks", True),
        ("megatron_terapipe.tensor_parallel.linear", "megatron_terapipe.model.norm", False),
        ("megatron_terapipe.tensor_parallel.linear", "megatron_terapipe.config.model", False),
        ("megatron_terapipe.model.gpt", "deepspeed", False),
        ("megatron_terapipe.data.loader", "megatron_terapipe.training.run", False),
        ("megatron_terapipe.training.run", "megatron_terapipe.inference.generation", False),
        ("megatron_terapipe.training.run", "tests.distributed", False),
    ],
)
def test_the_table_says_what_is_meant(module: str, target: str, allowed: bool) -> None:
    assert allows(LAYERS[height(module)], target) == allowed
