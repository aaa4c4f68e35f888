"""Modules that may import each other: the table of CONTRIBUTING.md, in full."""

import sys
from dataclasses import dataclass
from fnmatch import fnmatchcase
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.architecture.sources import imported_when_importing, imports_of, modules, where

PLAN = ("deepspeed_ext.plan",)
CONFIG = ("megatron_terapipe.config", "megatron_terapipe.errors")
FAMILIES = ("megatron_terapipe.huggingface.families",)
RECORDS = ("info", "manifest", "model_files", "directories", "foreign", "inert_pickles", "megatron_model")
"""Modules of checkpoint/ that need no torch."""
FOR_LAYERS = (
    "deepspeed_ext.pointwise",
    *(f"deepspeed_ext.runtime.{name}" for name in ("state.sequence_state", "state.counts", "topology")),
    *(f"deepspeed_ext.runtime.{name}" for name in ("attention.recurrences", "gradients.weight_gradients")),
)
"""The interface of the runtime for layers."""


def search(*folders: str) -> tuple[str, ...]:
    """Modules that those with access to some folders of the search may import."""
    return (
        *(*PLAN, *CONFIG),
        *(f"megatron_terapipe.{name}" for name in ("devices", "strategy", "dimensions", "texts", "launch")),
        *(f"megatron_terapipe.search.{folder}" for folder in folders),
    )


@dataclass(frozen=True)
class Layer:
    """Modules that may import the same."""

    modules: tuple[str, ...]
    """Patterns of their names. A module belongs to the longest pattern that fits it."""
    ours: tuple[str, ...] = ()
    """Modules of ours they may import with all in them, besides those of their own row."""
    packages: tuple[str, ...] = ()
    """Packages of others, or modules of such. All may import the standard library."""


LAYERS = (
    Layer(("deepspeed_ext", "megatron_terapipe")),
    Layer(("deepspeed_ext.plan", "deepspeed_ext.plan.*"), packages=("numpy", "numba", "rich")),
    Layer(("megatron_terapipe.errors",), PLAN),
    Layer(("megatron_terapipe.devices", "megatron_terapipe.records")),
    Layer(("megatron_terapipe.console",), PLAN, ("rich",)),
    # The table of all commands, which the search reads for its own.
    Layer(("megatron_terapipe.command", "megatron_terapipe.command.main"), PLAN),
    Layer(("megatron_terapipe.config", "megatron_terapipe.config.*"), (*PLAN, "megatron_terapipe.errors"), ("yaml",)),
    Layer(tuple(f"megatron_terapipe.{name}" for name in ("strategy", "dimensions", "texts")), (*PLAN, *CONFIG)),
    Layer(
        (
            *("megatron_terapipe.huggingface", "megatron_terapipe.huggingface.families"),
            "megatron_terapipe.huggingface.families.*",
        ),
        CONFIG,
    ),
    Layer(
        ("megatron_terapipe.checkpoint", *(f"megatron_terapipe.checkpoint.{name}" for name in RECORDS)),
        (*PLAN, *CONFIG, *FAMILIES),
    ),
    Layer(
        ("megatron_terapipe.arguments", "megatron_terapipe.arguments.*"),
        (
            *(*PLAN, *CONFIG, *FAMILIES),
            *(f"megatron_terapipe.checkpoint.{name}" for name in ("info", "directories", "foreign")),
            "megatron_terapipe.strategy",
        ),
    ),
    Layer(
        ("megatron_terapipe.neox", "megatron_terapipe.neox.*"),
        (*PLAN, *CONFIG, *FAMILIES),
        ("yaml",),
    ),
    Layer(("deepspeed_ext.pointwise",), PLAN, ("torch", "deepspeed")),
    Layer(
        ("deepspeed_ext.runtime", "deepspeed_ext.runtime.*"),
        (*PLAN, "deepspeed_ext.pointwise"),
        ("torch", "deepspeed", "packaging", "psutil"),
    ),
    Layer(
        ("megatron_terapipe.model", "megatron_terapipe.model.*"),
        (*PLAN, *CONFIG, *FOR_LAYERS),
        ("torch",),
    ),
    Layer(
        ("megatron_terapipe.model.gpt",),
        (*PLAN, *CONFIG, *FOR_LAYERS, "megatron_terapipe.model"),
        ("torch", "deepspeed.pipe"),
    ),
    # Imported by programs of users who have megatron-core, and by nothing here.
    Layer(
        ("megatron_terapipe.megatron_core",),
        (*PLAN, *CONFIG, *FOR_LAYERS, "megatron_terapipe.model"),
        ("torch", "deepspeed.pipe", "megatron"),
    ),
    Layer(
        ("megatron_terapipe.data", "megatron_terapipe.data.*"),
        (*PLAN, *CONFIG),
        ("torch", "numpy", "tqdm", "tokenizers", "sentencepiece", "tiktoken", "zstandard"),
    ),
    # safetensors is imported by name when files are opened.
    Layer(
        ("megatron_terapipe.huggingface.*",),
        (*PLAN, *CONFIG, *FAMILIES, "megatron_terapipe.model"),
        ("torch",),
    ),
    Layer(
        ("megatron_terapipe.checkpoint.*",),
        (
            *(*PLAN, *CONFIG, "deepspeed_ext.runtime", "megatron_terapipe.model"),
            *("megatron_terapipe.checkpoint", "megatron_terapipe.huggingface"),
        ),
        ("torch", "deepspeed.pipe", "deepspeed.runtime.checkpoint_engine"),
    ),
    Layer(
        ("megatron_terapipe.inference",),
        (
            *(*PLAN, *CONFIG, "deepspeed_ext.runtime", "megatron_terapipe.model", "megatron_terapipe.data"),
            "megatron_terapipe.checkpoint",
        ),
        ("torch", "deepspeed.pipe"),
    ),
    Layer(("megatron_terapipe.launch", "megatron_terapipe.launch.*"), (*PLAN, *CONFIG)),
    # The search, bottom first. scipy, rich and yaml are imported within functions: it must start at once.
    Layer(("megatron_terapipe.search",)),
    Layer(
        ("megatron_terapipe.search.machine", "megatron_terapipe.search.machine.*"),
        search(),
        ("numpy", "pydantic", "pydantic_core", "yaml"),
    ),
    Layer(
        ("megatron_terapipe.search.price", "megatron_terapipe.search.price.*"),
        (*search("machine"), *FAMILIES),
        ("numpy", "pydantic", "scipy", "pyarrow", "aiconfigurator_core"),
    ),
    Layer(
        ("megatron_terapipe.search.rank", "megatron_terapipe.search.rank.*"),
        search("machine", "price"),
        ("numpy", "numba"),
    ),
    Layer(
        ("megatron_terapipe.search.learn", "megatron_terapipe.search.learn.*"),
        search("machine", "price", "rank"),
        ("numpy", "pydantic", "scipy", "rich"),
    ),
    # The run of a configuration, planned with the search's cost model and solvers.
    Layer(("megatron_terapipe.planning",), search("machine", "price", "rank", "learn")),
    Layer(
        ("megatron_terapipe.training", "megatron_terapipe.training.*"),
        (
            *(*PLAN, *CONFIG, "deepspeed_ext.pointwise", "deepspeed_ext.runtime"),
            *("megatron_terapipe.model", "megatron_terapipe.data", "megatron_terapipe.checkpoint"),
            *("megatron_terapipe.planning", "megatron_terapipe.strategy", "megatron_terapipe.devices"),
            "megatron_terapipe.records",
        ),
        ("torch", "deepspeed", "numpy", "tqdm", "pydantic"),
    ),
    Layer(("megatron_terapipe.page", "megatron_terapipe.page.*"), PLAN),
    Layer(
        ("megatron_terapipe.search.answer", "megatron_terapipe.search.answer.*"),
        (*search("machine", "price", "rank", "learn"), "megatron_terapipe.page", "megatron_terapipe.console"),
        ("numpy", "pydantic", "rich", "tqdm"),
    ),
    Layer(
        ("megatron_terapipe.run_report", "megatron_terapipe.run_report.*"),
        (*search("price"), "megatron_terapipe.page", "megatron_terapipe.records"),
        ("pydantic",),
    ),
    # The probe of the doctor is sent to other hosts: it has only the standard library.
    Layer(("megatron_terapipe.doctor", *(f"megatron_terapipe.doctor.{name}" for name in ("facts", "probe")))),
    Layer(
        ("megatron_terapipe.doctor.*",),
        (
            *(*PLAN, *CONFIG, "megatron_terapipe.launch", "megatron_terapipe.console"),
            *("deepspeed_ext.runtime.cuda_environment", "deepspeed_ext.runtime.launch"),
            *(f"megatron_terapipe.doctor.{name}" for name in ("facts", "probe")),
        ),
        ("packaging", "pydantic", "rich"),
    ),
    # Commands put the parts together: they may import anything of ours, and no module imports them.
    Layer(
        (
            *(
                "pretrain_gpt",
                "megatron_terapipe.training.pretrain",
                "megatron_terapipe.generate",
                "megatron_terapipe.convert",
                "megatron_terapipe.__main__",
            ),
            *("megatron_terapipe.neox.__main__", "megatron_terapipe.command.*", "megatron_terapipe.search.__main__"),
            *("megatron_terapipe.search.answer.*_command", "megatron_terapipe.search.measure*"),
        ),
        ("deepspeed_ext", "megatron_terapipe"),
        ("torch", "deepspeed", "numpy", "pydantic", "tqdm", "rich", "yaml", "shtab"),
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
        f"{module} imports {other}, which is above it"
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


def test_functions_and_types_make_no_circle_either() -> None:
    sorter = TopologicalSorter[str]()
    for module, path in modules().items():
        targets = {each.target for each in imports_of(path)} & modules().keys()
        # Its own package runs before it, and may import it.
        own = {target for target in targets if f"{module}.".startswith(f"{target}.")}
        sorter.add(module, *(targets - own))
    try:
        sorter.prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


BACK = ("megatron_terapipe.training.pretrain", "megatron_terapipe.search.measure.own_model")
"""`search measure` runs a program of a user, in which `pretrain(layers)` then measures."""


def test_folders_make_no_circle() -> None:
    def folder(module: str) -> str:
        parts = module.split(".")
        return ".".join(parts[: 3 if parts[1:2] == ["search"] or "families" in parts else 2])

    sorter = TopologicalSorter[str]()
    for module, path in modules().items():
        targets = {each.target for each in imports_of(path) if (module, each.target) != BACK} & modules().keys()
        sorter.add(folder(module), *({folder(target) for target in targets} - {folder(module)}))
    try:
        sorter.prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_the_walk_sees_imports_at_import_time() -> None:
    assert "megatron_terapipe.config.flops" in imported_when_importing("megatron_terapipe.config.config")
    # For types only, and within a function.
    assert "deepspeed_ext.plan.solve.orders" not in imported_when_importing("megatron_terapipe.planning")
    assert "megatron_terapipe.training.trainer" not in imported_when_importing("pretrain_gpt")
    assert any(
        each.target == "megatron_terapipe.training.trainer"
        for each in imports_of(modules()["megatron_terapipe.training.pretrain"])
    )
    # A package runs before the modules in it.
    assert "megatron_terapipe.config" in imported_when_importing("megatron_terapipe.strategy")


@pytest.mark.parametrize(
    ("module", "target", "allowed"),
    [
        ("deepspeed_ext.plan.ops", "math", True),
        ("deepspeed_ext.plan.ops", "torch", False),
        ("deepspeed_ext.runtime.engine", "megatron_terapipe.errors", False),
        ("megatron_terapipe.config.config", "megatron_terapipe.config.flops", True),
        ("megatron_terapipe.config.config", "megatron_terapipe.planning", False),
        ("megatron_terapipe.huggingface.families.registry", "torch", False),
        ("megatron_terapipe.model.block", "deepspeed.pipe", False),
        ("megatron_terapipe.model.block", "deepspeed_ext.runtime.state.sequence_state", True),
        ("megatron_terapipe.model.block", "deepspeed_ext.runtime.module", False),
        ("megatron_terapipe.model.gpt", "deepspeed.pipe", True),
        ("megatron_terapipe.doctor.probe", "megatron_terapipe.errors", False),
        ("megatron_terapipe.search.rank.search", "megatron_terapipe.search.answer.figures", False),
        ("megatron_terapipe.training.run", "tests.distributed", False),
    ],
)
def test_the_table_allows_and_forbids(module: str, target: str, allowed: bool) -> None:
    assert allows(LAYERS[height(module)], target) == allowed
