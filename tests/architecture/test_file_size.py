"""No file is longer than a reader can hold in mind."""

from tests.architecture.sources import BESIDE, CODE, ROOT, python_files

MAX_LINES = 400


def test_no_module_is_too_long() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in python_files(*CODE, *BESIDE)}
    too_long = [f"{path.relative_to(ROOT)}: {lines}" for path, lines in lengths.items() if lines > MAX_LINES]
    assert not too_long, f"cut along a responsibility: {', '.join(too_long)} lines, and {MAX_LINES} are allowed"
