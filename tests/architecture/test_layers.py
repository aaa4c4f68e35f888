"""Who may import whom: the table of CONTRIBUTING.md, in full."""

import sys
from dataclasses import dataclass
from fnmatch import fnmatchcase
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.architecture.sources import imported_when_importing, imports_of, modules, where

PLAN = ("deepspeed_ext.plan",)
CONFIG = ("megatron_terapipe.config", "megatron_terapipe.errors")
FAMILIES = ("megatron_terapipe.huggingface.families",)


def search(*folders: str) -> tuple[str, ...]:
    """What may be imported by those who may import some folders of the search."""
    return (
        *PLAN,
        *CONFIG,
        "megatron_terapipe.strategy",
        "megatron_terapipe.strategy_fields",
        "megatron_terapipe.dimensions",
        *(f"megatron_terapipe.search.{folder}" for folder in folders),
    )


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
    Layer(("megatron_terapipe.devices",)),
    # The table of all commands, which the search reads for its own.
    Layer(("megatron_terapipe.command", "megatron_terapipe.command.commands")),
    Layer(("megatron_terapipe.config", "megatron_terapipe.config.*"), (*PLAN, "megatron_terapipe.errors"), ("yaml",)),
    Layer(
        ("megatron_terapipe.strategy", "megatron_terapipe.strategy_fields", "megatron_terapipe.dimensions"),
        (*PLAN, *CONFIG),
    ),
    Layer(
        (
            "megatron_terapipe.huggingface",
            "megatron_terapipe.huggingface.families",
            "megatron_terapipe.huggingface.families.*",
            "megatron_terapipe.huggingface.tokenizer_files",
        ),
        CONFIG,
    ),
    Layer(
        (
            "megatron_terapipe.checkpoint",
            "megatron_terapipe.checkpoint.info",
            "megatron_terapipe.checkpoint.run_fields",
            "megatron_terapipe.checkpoint.manifest",
            "megatron_terapipe.checkpoint.file_names",
            "megatron_terapipe.checkpoint.directories",
        ),
        (*PLAN, *CONFIG, *FAMILIES),
    ),
    Layer(
        ("megatron_terapipe.arguments", "megatron_terapipe.arguments.*"),
        (
            *PLAN,
            *CONFIG,
            *FAMILIES,
            "megatron_terapipe.huggingface.tokenizer_files",
            "megatron_terapipe.checkpoint.info",
            "megatron_terapipe.checkpoint.directories",
            "megatron_terapipe.strategy",
            "megatron_terapipe.strategy_fields",
        ),
    ),
    Layer(
        ("megatron_terapipe.neox", "megatron_terapipe.neox.*"),
        (*PLAN, *CONFIG, "megatron_terapipe.arguments.megatron_flags.unsupported_flags"),
        ("yaml",),
    ),
    Layer(("deepspeed_ext.pointwise",), PLAN, ("torch", "deepspeed")),
    Layer(
        ("deepspeed_ext.runtime", "deepspeed_ext.runtime.*"),
        (*PLAN, "deepspeed_ext.pointwise"),
        ("torch", "deepspeed", "packaging", "psutil"),
    ),
    # transformers is imported when a model of it is handed over.
    Layer(
        ("deepspeed_ext.transformers_layers", "deepspeed_ext.transformers_layers.*"),
        (*PLAN, "deepspeed_ext.runtime"),
        ("torch", "deepspeed.pipe", "deepspeed.runtime.pipe", "transformers"),
    ),
    Layer(("megatron_terapipe.tensor_parallel", "megatron_terapipe.tensor_parallel.*"), packages=("torch",)),
    Layer(
        ("megatron_terapipe.model", "megatron_terapipe.model.*"),
        (*(*PLAN, *CONFIG, "deepspeed_ext.pointwise", "megatron_terapipe.tensor_parallel"),),
        ("torch",),
    ),
    Layer(
        ("megatron_terapipe.model.gpt",),
        (*PLAN, *CONFIG, "megatron_terapipe.model", "megatron_terapipe.tensor_parallel"),
        ("torch", "deepspeed.pipe"),
    ),
    Layer(
        ("megatron_terapipe.data", "megatron_terapipe.data.*"),
        (*PLAN, *CONFIG),
        ("torch", "numpy", "regex", "tqdm", "tokenizers", "sentencepiece", "tiktoken", "zstandard"),
    ),
    # safetensors is imported by name when files are opened.
    Layer(
        ("megatron_terapipe.huggingface.weights", "megatron_terapipe.huggingface.weights.*"),
        (*PLAN, *CONFIG, *FAMILIES, "megatron_terapipe.model"),
        ("torch",),
    ),
    Layer(
        ("megatron_terapipe.checkpoint.*",),
        (
            *(*PLAN, *CONFIG, *FAMILIES, "deepspeed_ext.runtime", "megatron_terapipe.model"),
            *("megatron_terapipe.checkpoint", "megatron_terapipe.huggingface.weights"),
        ),
        ("torch", "deepspeed.pipe", "deepspeed.runtime.checkpoint_engine"),
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
        ("megatron_terapipe.huggingface.*",),
        (
            *(*PLAN, *CONFIG, "deepspeed_ext.runtime", "megatron_terapipe.model", "megatron_terapipe.checkpoint"),
            "megatron_terapipe.huggingface",
        ),
        ("torch",),
    ),
    # The search, bottom first. scipy, rich and yaml are imported within functions: it must start at once.
    Layer(("megatron_terapipe.search",)),
    Layer(
        ("megatron_terapipe.search.inputs", "megatron_terapipe.search.inputs.*"),
        (*PLAN, *CONFIG, *FAMILIES, "megatron_terapipe.devices"),
        ("pydantic", "pydantic_core", "yaml"),
    ),
    Layer(
        ("megatron_terapipe.search.software", "megatron_terapipe.search.software.*"),
        search("inputs"),
        ("numpy", "pydantic"),
    ),
    Layer(
        ("megatron_terapipe.search.op_times", "megatron_terapipe.search.op_times.*"),
        search("inputs", "software"),
        ("numpy", "pydantic", "scipy", "pyarrow", "aiconfigurator_core"),
    ),
    Layer(
        ("megatron_terapipe.search.cost", "megatron_terapipe.search.cost.*"),
        search("inputs", "software", "op_times"),
        ("numpy",),
    ),
    Layer(
        ("megatron_terapipe.search.space", "megatron_terapipe.search.space.*"),
        search("inputs", "software", "op_times", "cost"),
        ("numpy",),
    ),
    Layer(
        ("megatron_terapipe.search.rank", "megatron_terapipe.search.rank.*"),
        search("inputs", "software", "op_times", "cost", "space"),
        ("numpy", "numba"),
    ),
    Layer(
        ("megatron_terapipe.search.rivals", "megatron_terapipe.search.rivals.*"),
        search("inputs", "software", "op_times", "cost"),
        ("numpy",),
    ),
    # The run of a configuration, planned with the search's cost model and solvers.
    Layer(
        ("megatron_terapipe.planning", "megatron_terapipe.planning.*"),
        search("inputs", "software", "op_times", "cost", "space", "rank", "trials"),
    ),
    Layer(
        ("megatron_terapipe.training", "megatron_terapipe.training.*"),
        (
            "deepspeed_ext.pointwise",
            *(*PLAN, *CONFIG, "deepspeed_ext.runtime", "megatron_terapipe.model", "megatron_terapipe.data"),
            "megatron_terapipe.checkpoint",
            "megatron_terapipe.tensor_parallel",
            "megatron_terapipe.planning",
            "megatron_terapipe.strategy",
            "megatron_terapipe.strategy_fields",
            "megatron_terapipe.devices",
        ),
        ("torch", "deepspeed", "numpy", "tqdm", "pydantic"),
    ),
    Layer(("megatron_terapipe.page", "megatron_terapipe.page.*"), PLAN),
    Layer(
        ("megatron_terapipe.search.report", "megatron_terapipe.search.report.*"),
        (*search("inputs", "software", "op_times", "cost", "space", "rank", "rivals"), "megatron_terapipe.page"),
        ("numpy", "pydantic", "rich"),
    ),
    Layer(
        ("megatron_terapipe.search.trials", "megatron_terapipe.search.trials.*"),
        search("inputs", "software", "op_times", "cost", "space", "rank", "report"),
        ("numpy", "pydantic", "scipy", "rich"),
    ),
    # Of training it reads what the metrics file is made of, which needs no torch.
    Layer(
        ("megatron_terapipe.run_report", "megatron_terapipe.run_report.*"),
        (
            *search("report"),
            "megatron_terapipe.page",
            "megatron_terapipe.training.records.events",
            "megatron_terapipe.training.records.metrics",
        ),
        ("pydantic",),
    ),
    # The probe of the doctor travels to other hosts: it has the standard library alone.
    Layer(
        (
            *("megatron_terapipe.doctor", "megatron_terapipe.doctor.facts"),
            *("megatron_terapipe.doctor.probe", "megatron_terapipe.doctor.probe.*"),
        )
    ),
    Layer(
        ("megatron_terapipe.doctor.*",),
        (
            *(*PLAN, *CONFIG, "deepspeed_ext.runtime.cuda_environment"),
            *("megatron_terapipe.doctor.facts", "megatron_terapipe.doctor.probe"),
            "megatron_terapipe.search.inputs.hostfile",
        ),
        ("packaging", "pydantic", "rich"),
    ),
    # The forms of all files, as those say that write them.
    Layer(
        ("megatron_terapipe.file_formats", "megatron_terapipe.file_formats.*"),
        (
            *(*search("report"), *PLAN, "deepspeed_ext.runtime.ledger.ledger_file"),
            *("megatron_terapipe.checkpoint.info", "megatron_terapipe.checkpoint.manifest"),
            *("megatron_terapipe.data.preprocess", "megatron_terapipe.data.tokenizer_record"),
        ),
        ("pydantic",),
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
            "megatron_terapipe.command.*",
            "megatron_terapipe.__main__",
        ),
        ("deepspeed_ext", "megatron_terapipe"),
        ("torch", "deepspeed", "numpy", "tqdm", "rich", "yaml", "shtab"),
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
    assert "megatron_terapipe.config.model.flops" in imported_when_importing(
        "megatron_terapipe.config.parallel.balance"
    )
    # For types alone, and within a function.
    assert "deepspeed_ext.plan.optimise" not in imported_when_importing("megatron_terapipe.planning.pipeline_plan")
    assert "megatron_terapipe.training.trainer" not in imported_when_importing("pretrain_gpt")
    assert any(each.target == "megatron_terapipe.training.trainer" for each in imports_of(modules()["pretrain_gpt"]))
    # A package runs before what is in it.
    assert "megatron_terapipe.config" in imported_when_importing("megatron_terapipe.strategy")


@pytest.mark.parametrize(
    ("module", "target", "allowed"),
    [
        ("deepspeed_ext.plan.ops", "math", True),
        ("deepspeed_ext.plan.ops", "torch", False),
        ("deepspeed_ext.plan.ops", "deepspeed_ext.runtime.batches.batch", False),
        ("deepspeed_ext.runtime.engine", "megatron_terapipe.errors", False),
        ("megatron_terapipe.config.config", "megatron_terapipe.config.model.flops", True),
        ("megatron_terapipe.config.config", "megatron_terapipe.planning.planned_run", False),
        ("megatron_terapipe.config.config", "megatron_terapipe.model.gpt", False),
        ("megatron_terapipe.arguments.model_sources", "megatron_terapipe.huggingface.families.registry", True),
        ("megatron_terapipe.arguments.model_sources", "megatron_terapipe.huggingface.weights.folder", False),
        ("megatron_terapipe.huggingface.families.registry", "torch", False),
        ("megatron_terapipe.training.start.run", "megatron_terapipe.huggingface.export", False),
        ("megatron_terapipe.model.block", "deepspeed.pipe", False),
        ("megatron_terapipe.model.gpt", "deepspeed.pipe", True),
        ("megatron_terapipe.model.block", "megatron_terapipe.tensor_parallel.ranks", True),
        ("megatron_terapipe.tensor_parallel.linear", "megatron_terapipe.model.norm", False),
        ("megatron_terapipe.tensor_parallel.linear", "megatron_terapipe.config.model.model", False),
        ("megatron_terapipe.model.gpt", "deepspeed", False),
        ("megatron_terapipe.planning.cost_model", "megatron_terapipe.search.cost.cost_model", True),
        ("megatron_terapipe.planning.cost_model", "megatron_terapipe.search.trials.costs", True),
        ("megatron_terapipe.planning.cost_model", "megatron_terapipe.search.report.table", False),
        ("megatron_terapipe.doctor.checks.devices", "megatron_terapipe.doctor.facts", True),
        ("megatron_terapipe.doctor.probe.agent", "megatron_terapipe.errors", False),
        ("megatron_terapipe.doctor.probe.agent", "megatron_terapipe.doctor.checks.devices", False),
        ("megatron_terapipe.search.rank.search", "megatron_terapipe.planning.planned_run", False),
        ("megatron_terapipe.data.samples.loader", "megatron_terapipe.training.start.run", False),
        ("megatron_terapipe.training.start.run", "megatron_terapipe.inference.generation", False),
        ("megatron_terapipe.training.start.run", "tests.distributed", False),
    ],
)
def test_the_table_says_what_is_meant(module: str, target: str, allowed: bool) -> None:
    assert allows(LAYERS[height(module)], target) == allowed
