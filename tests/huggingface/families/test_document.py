"""The chapter lists the families that there are."""

import re
from pathlib import Path

from megatron_terapipe.huggingface.families.registry import FAMILIES

CHAPTER = Path(__file__).parents[3] / "docs" / "how-to" / "huggingface.md"


def test_the_table_has_every_family() -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", CHAPTER.read_text(), re.MULTILINE)) - {"model_type"} == FAMILIES.keys()
