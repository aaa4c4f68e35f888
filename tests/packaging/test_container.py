"""The container file copies existing files, and all that the installation needs. No test builds it."""

import re

from tests.architecture.sources import CODE, ROOT

DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")


def copied() -> list[str]:
    """Files and folders of the checkout that the image gets."""
    return [source for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.MULTILINE) for source in line.split()[:-1]]


def test_copied_files_exist_and_are_not_ignored() -> None:
    kept = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(copied()) == sorted(kept)
    assert [name for name in copied() if not (ROOT / name).exists()] == []


def test_files_of_the_installation_are_copied() -> None:
    assert {*CODE, "pretrain_gpt.py", "setup.py", "pyproject.toml", "README.md", "LICENSE"} <= set(copied())


def test_it_installs_the_torch_that_the_tests_run_with() -> None:
    tested = re.search(r"^TORCH \?= (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert tested and f"ARG TORCH={tested[1]}\n" in DOCKERFILE


def test_the_run_is_not_roots_and_no_variable_of_nccl_is_set() -> None:
    assert re.findall(r"^USER (.+)$", DOCKERFILE, re.MULTILINE) == ["terapipe"]
    assert not re.search(r"^ENV.*NCCL_", DOCKERFILE, re.MULTILINE)
