"""The wheel has the files that the code needs and no others, and runs without a checkout.

As on a release, the wheel is made from the source archive. Both are made once, without a network.
"""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest
from packaging.requirements import Requirement

import deepspeed_ext
from tests.architecture.sources import CODE, ROOT

MADE_HERE = ignore_patterns(
    "__pycache__", ".*_cache", ".venv", ".git", ".hypothesis", "*.egg-info", "build", "dist", "runs"
)
"""Files of builds and runs in a checkout."""
BUILD = "from setuptools import build_meta; print(build_meta.build_{kind}({folder!r}), file=__import__('sys').stderr)"
LINK = re.compile(r"\]\((?!https?://)|<img\b|<picture\b")
"""A picture of the project, or a link to one of its files."""


@dataclass(frozen=True)
class Built:
    """A release."""

    archive: frozenset[str]
    """Names of the files of the source archive, without its own folder."""
    wheel: frozenset[str]
    """Names of the files of the wheel."""
    metadata: Message
    """The metadata of the wheel."""
    installed: Path
    """Folder into which the wheel is installed, without its requirements."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The release of this checkout."""
    folder = tmp_path_factory.mktemp("release")
    copytree(ROOT, folder / "checkout", ignore=MADE_HERE)
    archive = _build("sdist", folder / "checkout", folder)
    with tarfile.open(archive) as file:
        file.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    names = frozenset(str(path.relative_to(source)) for path in source.rglob("*") if path.is_file())
    wheel = _build("wheel", source, folder)
    with zipfile.ZipFile(wheel) as file:
        inside = frozenset(file.namelist())
        (metadata,) = (name for name in inside if name.endswith(".dist-info/METADATA"))
        said = HeaderParser().parsestr(file.read(metadata).decode())
    installed = folder / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--no-index"]
    _run([*pip, "--target", str(installed), str(wheel)], folder)
    return Built(names, inside, said, installed)


def _build(kind: str, source: Path, folder: Path) -> Path:
    _run([sys.executable, "-c", BUILD.format(kind=kind, folder=str(folder))], source)
    return next(folder.glob("*.whl" if kind == "wheel" else "*.tar.gz"))


def _run(words: list[str], folder: Path, **variables: str) -> None:
    """Run a program in a folder, without this checkout."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RANK", "WORLD_SIZE")}
    done = subprocess.run(words, cwd=folder, env={**inherited, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def _files(*folders: str) -> Iterator[str]:
    """Files of this checkout, as they are named in an archive."""
    for folder in folders:
        for path in (ROOT / folder).rglob("*"):
            name = path.relative_to(ROOT)
            if path.is_file() and not any(part == "__pycache__" or part.startswith(".") for part in name.parts):
                yield str(name)


def test_the_wheel_holds_the_packages_the_trainer_and_the_examples_and_nothing_else(built: Built) -> None:
    about = {name for name in built.wheel if ".dist-info/" in name}
    share = f"megatron_terapipe-{deepspeed_ext.__version__}.data/data/share/megatron-terapipe/"
    examples = {f"{share}{name}" for name in _files("examples")}
    assert built.wheel - about == {*_files(*CODE), *examples, "pretrain_gpt.py"}
    assert {"licenses/LICENSE", "licenses/NOTICE"} <= {name.partition(".dist-info/")[2] for name in about}


def test_the_source_archive_holds_the_project(built: Built) -> None:
    """It has examples, documents and tests for users without a checkout."""
    folders = (*CODE, "benchmarks", "docs", "examples", "tests")
    top = {path.name for path in ROOT.iterdir() if path.suffix in (".md", ".py", ".toml", ".cff", ".example")}
    assert {*_files(*folders), *top, "LICENSE", "NOTICE", "Makefile", "MANIFEST.in", ".ci/run"} <= built.archive
    assert not [name for name in built.archive if name.endswith((".pyc", ".so"))]


def test_the_notice_names_files_that_are_there() -> None:
    named = re.findall(r"(?:megatron_terapipe|examples|tests|docs)/[\w/.]+", (ROOT / "NOTICE").read_text())
    assert len(named) > 5 and all((ROOT / name).exists() for name in named)


def test_the_page_of_an_index(built: Built) -> None:
    """There is one version, and the page has no link and no picture that only a checkout has."""
    assert (built.metadata["Name"], built.metadata["Version"]) == ("megatron-terapipe", deepspeed_ext.__version__)
    assert built.metadata["License"] == "Apache-2.0"
    page = str(built.metadata.get_payload())
    assert LINK.search((ROOT / "README.md").read_text(encoding="utf-8"))
    assert LINK.search(page) is None
    assert page.startswith("# megatron-terapipe\n") and "https://arxiv.org/abs/2102.07988" in page


def test_every_extra_is_in_the_table_of_the_documents(built: Built) -> None:
    page = (ROOT / "docs" / "how-to" / "install.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `\[(\w+)\]` \|(.*)\|$", page, re.MULTILINE)
    required = [Requirement(words) for words in built.metadata.get_all("Requires-Dist")]
    brings = {
        extra: {each.name for each in required if each.marker and each.marker.evaluate({"extra": extra})}
        for extra in built.metadata.get_all("Provides-Extra")
    }
    assert dict(rows).keys() == brings.keys()
    for extra, row in rows:
        if extra not in ("dev", "docs"):
            assert brings[extra] == set(re.findall(r"`([\w-]+)`", row.rpartition("|")[2])), extra


def test_plan_search_and_trainer_run_where_there_is_no_checkout(built: Built, tmp_path: Path) -> None:
    """Pages find their styles and scripts, and the launch script of a plan finds the trainer."""
    examples = built.installed / "share" / "megatron-terapipe" / "examples"
    variables = {
        "PYTHONPATH": str(built.installed),
        "PATH": f"{built.installed / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        # Compiling the simulator, which a first search after an installation does, takes longer than all else here.
        "NUMBA_DISABLE_JIT": "1",
    }
    for command in (
        f"cp -r {examples} .",
        "python -m deepspeed_ext.plan --schedule 1f1b --stages 2 --micro-batches 2 --html schedule.html",
        "terapipe search rank examples/models/tiny.json examples/clusters/this-machine.json --global-batch-size 4 "
        "--num-token-slices 1 --output plan --html search.html",
        "bash plan/launch.sh --dry-run",
    ):
        _run(command.split(), tmp_path, **variables)
    (style,) = ROOT.glob("deepspeed_ext/**/page/style.css")
    for page in ("schedule.html", "search.html"):
        assert style.read_text("utf-8") in (tmp_path / page).read_text("utf-8")
