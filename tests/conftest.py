"""Settings that all tests share."""

import pytest
from hypothesis import settings

# A property is about values, not about how busy the machine is.
settings.register_profile("project", deadline=None)
settings.load_profile("project")

LONGEST = ("test_gpt_equivalence.py", "test_reshape.py", "test_engine_equivalence.py", "test_bitwise.py")
"""Files that take minutes. They go first, so that at the end no worker is left alone with one."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Bring the longest files to the front; the order within a file stays."""
    items.sort(key=lambda item: item.path.name not in LONGEST)
