"""A folder is a room: a reader sees at once what is in it."""

from collections import Counter

from tests.architecture.sources import BESIDE, CODE, ROOT, python_files

MOST_FILES = 15
CROWDED = {"benchmarks": 27}
"""Folders with more, and how many they may have. Each file of `benchmarks` is a command that documents name."""


def test_no_folder_is_crowded() -> None:
    files = [path for path in python_files(*CODE, *BESIDE) if path.name != "__init__.py"]
    counts = Counter(path.parent.relative_to(ROOT).as_posix() for path in files)
    crowded = [f"{folder}: {count}" for folder, count in counts.items() if count > CROWDED.get(folder, MOST_FILES)]
    assert not crowded, f"split by meaning: {', '.join(crowded)} files, and {MOST_FILES} are allowed"


def test_folders_that_are_no_longer_crowded_are_not_listed() -> None:
    counts = {folder: len([*(ROOT / folder).glob("*.py")]) - 1 for folder in CROWDED}
    assert counts == CROWDED
