"""Flags and files that documents and examples name exist."""

import ast
import re
import shlex
from pathlib import Path

import pytest

from megatron_terapipe.arguments import flags, parse_arguments
from megatron_terapipe.arguments.foreign_flags import foreign_flags
from megatron_terapipe.arguments.parser import spellings
from megatron_terapipe.strategy import DIMENSIONS
from tests.architecture.sources import BESIDE, CODE, ROOT, documents, python_files, tree_of, where

SCRIPTS = sorted((ROOT / "examples").glob("*.sh"))
OF_TOOLS = {
    *("--hostfile", "--num_accelerators", "--num_gpus", "--include", "--exclude", "--module"),  # the launcher
    "--force_multi",
    *("--standalone", "--nproc-per-node", "--max-restarts", "--rdzv-backend", "--rdzv-endpoint"),
    *("--launcher", "--launcher_args", "--no_local_rank", "--master_addr", "--master_port"),
    *("--nnodes", "--nproc_per_node", "--node_rank"),  # torchrun
    *("--nodes", "--ntasks-per-node"),  # srun
    *("--help",),  # every command
    *("--no-deps", "--no-index", "--find-links", "--wheel-dir"),  # pip
    *("--file", "--tag", "--build-arg", "--rm", "--gpus", "--ipc", "--ulimit"),  # docker
    *("--volume", "--network", "--device", "--env"),
}
FLAG = re.compile(r"(?<![\w-])--[A-Za-z][\w-]*+(?!\.\w)")  # not `--section.name` of other trainers


def known_flags() -> set[str]:
    """Every flag of a command of ours, of benchmarks among them."""
    known = {spelling for each in flags() for names, _ in spellings(each) for spelling in names}
    foreign = foreign_flags().flags
    known |= {name for name, each in foreign.items() if each.verdict != "refused"}
    known |= {each.flag for each in DIMENSIONS if each.flag_help is not None}
    for path in python_files(*CODE, *BESIDE):
        for node in ast.walk(tree_of(path)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("add_argument", "addoption")
            ):
                words = (str(word.value) for word in node.args if isinstance(word, ast.Constant))
                names = [word for word in words if word.startswith("--")]
                known.update(names)
                if any("BooleanOptionalAction" in ast.dump(keyword) for keyword in node.keywords):
                    known.update(f"--no-{name[2:]}" for name in names)
    return known | OF_TOOLS


def test_flags_exist() -> None:
    known = known_flags()
    unknown = [
        f"{where(path, number)} {flag}"
        for path in documents() + SCRIPTS
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        for flag in FLAG.findall(line)
        if flag not in known
        and flag.replace("_", "-") not in known
        # It says what to do about them.
        and not (path.name == "migrating.md" and flag in foreign_flags().having("refused"))
    ]
    assert not unknown, "\n".join(unknown)


@pytest.mark.parametrize(
    "path", [path for path in SCRIPTS if "pretrain_gpt.py" in path.read_text()], ids=lambda p: p.stem
)
def test_trainer_takes_the_flags_of_examples(path: Path) -> None:
    (command,) = re.findall(r"pretrain_gpt\.py((?:.*\\\n)*.*)", path.read_text(encoding="utf-8"))
    # Values of the shell: a number of stages, a flag that may be left out, names of files.
    command = command.replace('"$stages"', "2").replace("$precision", "").replace("\\\n", " ")
    config = parse_arguments(shlex.split(command))
    assert config.num_micro_batches(1) >= 1


def test_files_that_the_architecture_names_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    names = re.findall(r"`([\w/]+\.py)`", text)
    paths = {str(path.relative_to(ROOT)) for path in python_files(*CODE, *BESIDE)}
    missing = [name for name in names if not any(f"/{path}".endswith(f"/{name}") for path in paths)]
    assert names
    assert not missing, ", ".join(missing)
