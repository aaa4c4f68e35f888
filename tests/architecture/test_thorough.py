"""What only `make test-all` runs is listed in CONTRIBUTING.md, beside the tests that prove it at each commit."""

import re

from tests.architecture.sources import ROOT, python_files

FILE = re.compile(r"`(tests/[\w/]+\.py)`")
MARK = re.compile(r"\bpytest\.mark\.thorough\b")


def listed() -> list[tuple[set[str], set[str]]]:
    """Rows of the table: files with tests that only `make test-all` runs, and files that prove the same."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.split("| what runs in `make test-all` only |", 1)[1].split("\n\n", 1)[0]
    rows = [line.split("|")[1:3] for line in table.splitlines()[2:]]
    return [(set(FILE.findall(moved)), set(FILE.findall(proof))) for moved, proof in rows]


def test_each_marked_file_is_in_the_table() -> None:
    marked = {
        str(path.relative_to(ROOT))
        for path in python_files("tests")
        if path.name != "test_thorough.py" and MARK.search(path.read_text(encoding="utf-8"))
    }
    assert marked == {file for moved, _ in listed() for file in moved}


def test_each_row_names_files_that_prove_it() -> None:
    for moved, proof in listed():
        assert moved and proof, (moved, proof)
        assert all((ROOT / file).exists() for file in moved | proof), (moved, proof)
