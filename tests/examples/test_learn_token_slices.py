"""The lesson: its output and picture are those of its page, and a wrong order or gradient ends it."""

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ext.plan.errors import PlanError
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.schedules import one_f_one_b

ROOT = Path(__file__).parents[2]
LESSON = ROOT / "examples" / "learn_token_slices.py"
PAGE = ROOT / "docs" / "concepts" / "token-slices.md"
PICTURE = ROOT / "docs" / "img" / "lesson.svg"
BACKWARD_ORDER = "for s in reversed(token_slices)"
WARMUP = "warmup = shape.num_stages - rank - 1 + shape.num_token_slices"
SIZES = "STAGES, MICRO_BATCHES, TOKENS, WIDTH, VOCABULARY = 2, 2, 2048, 256, 512"


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, old: str = "", new: str = "") -> dict[str, Any]:
    """Run the lesson in a folder, with one text of it changed and a smaller toy; return its names."""
    text = LESSON.read_text(encoding="utf-8")
    for before, after in ((SIZES, "STAGES, MICRO_BATCHES, TOKENS, WIDTH, VOCABULARY = 2, 2, 16, 8, 11"), (old, new)):
        assert before in text
        text = text.replace(before, after, 1)
    (folder / "lesson.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["lesson.py", str(folder / "lesson.svg")])
    return runpy.run_path(str(folder / "lesson.py"))


def test_the_page_shows_its_schedule_and_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, monkeypatch)
    page, printed = PAGE.read_text(encoding="utf-8"), capsys.readouterr().out
    (shown,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert shown in LESSON.read_text(encoding="utf-8")
    (drawing,) = re.findall(r"^stage 0.*?\n\n", printed, re.MULTILINE | re.DOTALL)
    assert drawing.rstrip() in page
    (refused,) = re.findall(r"^refused: .*$", printed, re.MULTILINE)
    assert refused in page.replace("\n", " ")


def test_its_figures_are_those_of_the_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = run(tmp_path, monkeypatch)
    printed = capsys.readouterr().out
    # After a change that is meant: python examples/learn_token_slices.py docs/img/lesson.svg
    assert (tmp_path / "lesson.svg").read_text() == PICTURE.read_text()
    rows = re.findall(r"^ +(\d) +([\d.]+) +([\d.]+%) +([\d.]+%) +\d+ ms +\d+ ms", printed, re.MULTILINE)
    assert [row[:2] for row in rows] == [("1", "36.0"), ("2", "30.0"), ("4", "27.0")]
    assert all(simulated == formula for *_, simulated, formula in rows)
    assert "refused: the schedule deadlocks" in printed
    assert float(re.findall(r"executed anyway, gradients are off by (\S+)", printed)[0]) > 1e-2
    for shape in (PipelineShape(3, 2, 4), PipelineShape(4, 1, 1), PipelineShape(2, 5, 3), PipelineShape(6, 1, 2)):
        for rank in range(shape.num_ranks):
            assert [*names["schedule"](shape, rank)] == [*one_f_one_b(shape, rank)]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (BACKWARD_ORDER, "for s in token_slices", "deadlocks"),
        ("yield from forwards[:warmup]", "yield from forwards[1:warmup]", "0F0.0"),
        (WARMUP, "warmup = 1", "deadlocks"),
    ],
    ids=["backward-reversed", "op-missing", "too-few-forwards"],
)
def test_a_wrong_order_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        run(tmp_path, monkeypatch, old, new)


def test_missing_gradients_of_keys_and_values_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="gradients are wrong"):
        run(tmp_path, monkeypatch, "*(leaf.grad for", "*(None for")


def test_gpipe_has_another_picture_and_the_same_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run(tmp_path, monkeypatch, WARMUP, "warmup = 99")
    assert (tmp_path / "lesson.svg").read_text() != PICTURE.read_text()
    assert {each.peak_live_token_slices for each in names["timelines"]} == {(2,) * 2, (4,) * 2, (8,) * 2}


drawing = runpy.run_path(str(ROOT / "examples" / "draw_key_values.py"))


def test_the_picture_is_the_one_that_is_drawn() -> None:
    # After a change that is meant: python examples/draw_key_values.py docs/img/key-values.svg
    assert (ROOT / "docs" / "img" / "key-values.svg").read_text(encoding="utf-8") == drawing["picture"]()


def test_its_rows_are_in_the_order_of_the_schedules() -> None:
    rows = re.findall(r">([FB]0\.\d)<", drawing["picture"]())
    assert rows == [f"{op.kind.value}0.{op.token_slice}" for op in one_f_one_b(PipelineShape(1, 1, 4), 0)]


def test_each_token_slice_completes_its_own_gradients_last_to_first() -> None:
    words = re.findall(r">(write|read|add|complete)<", drawing["picture"]())
    assert words[:10] == [word for row in range(4) for word in (*["read"] * row, "write")]
    assert words[10:] == [word for row in reversed(range(4)) for word in (*["add"] * row, "complete")]
