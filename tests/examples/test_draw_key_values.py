"""The picture of keys and values is the one that is drawn, and says what the table of dependencies does."""

import re
import runpy
from pathlib import Path

from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.schedules import one_f_one_b

ROOT = Path(__file__).parents[2]
drawing = runpy.run_path(str(ROOT / "examples" / "draw_key_values.py"))


def test_the_picture_is_the_one_that_is_drawn() -> None:
    # After a change that is meant: python examples/draw_key_values.py docs/img/key-values.svg
    assert (ROOT / "docs" / "img" / "key-values.svg").read_text(encoding="utf-8") == drawing["picture"]()


def test_its_rows_are_in_the_order_of_the_schedules() -> None:
    rows = re.findall(r">([FB]0\.\d)<", drawing["picture"]())
    assert rows == [f"{op.kind.value}0.{op.token_slice}" for op in one_f_one_b(PipelineShape(1, 1, 4), 0)]


def test_each_token_slice_completes_its_own_gradients_last_to_first() -> None:
    said = re.findall(r">(write|read|add|complete)<", drawing["picture"]())
    assert said[:10] == [word for row in range(4) for word in (*["read"] * row, "write")]
    assert said[10:] == [word for row in reversed(range(4)) for word in (*["add"] * row, "complete")]
