"""Steps of a command for one device: results are kept whatever ends a step, and missing packages come from wheels."""

import json
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.measuring import packages, steps
from benchmarks.measuring.report import Section
from benchmarks.measuring.steps import Campaign, Step, main

HERE = "tests.gpu.test_steps"
ROWS = {"first": "1", "second": "2"}


def table_that_ends(end: str) -> Iterator[Section]:
    table = Section("Table", ("row", "value"), notes=["Of all steps."])
    table.add(f"{end} first", 1)
    yield table
    table.add(f"{end} second", 2)
    if end == "hangs":
        yield table
        time.sleep(600)
    if end == "fails":
        raise ValueError(f"{end}: 3 is too many\nmore")


def test_rows_are_kept_and_the_next_step_runs_whatever_ends_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    function = f"{HERE}:table_that_ends"
    table = (
        Step("fails", function, 60, {"end": "fails"}),
        Step("hangs", function, 6, {"end": "fails"}, on_cpu={"end": "hangs"}),
        Step("no module", "tests.gpu.nothing:here", 60),
        Step("device", function, 60, on_cpu=None),
    )
    campaign = Campaign("tried", tmp_path, cpu=True)
    for step in table:
        campaign.run(step)
    campaign._end = time.monotonic() + 1
    campaign.run(Step("late", function, 60))
    found = json.loads((tmp_path / "tried.json").read_text())
    of_both, of_steps = found["sections"]
    assert of_both["rows"] == [[f"{end} {row}", value] for end in ("fails", "hangs") for row, value in ROWS.items()]
    assert of_both["notes"] == ["Of all steps."]
    assert [row[:2] for row in of_steps["rows"]] == [
        ["fails", "failed: ValueError: fails: 3 is too many"],
        ["hangs", "HUNG: no end within 6 s"],
        ["no module", "failed: ModuleNotFoundError: No module named 'tests.gpu.nothing'"],
        ["device", "skipped: needs a device"],
        ["late", "skipped: the 540 s of this command are over"],
    ]
    assert campaign.failed
    log = (tmp_path / "tried.log").read_text()
    assert "=== hangs" in log and "in table_that_ends" in log.partition("=== hangs")[2].partition("=== no module")[0]
    assert "| hangs first | 1 |" in (tmp_path / "tried.md").read_text()


def wheel(folder: Path, name: str, tags: str, module: str) -> None:
    with zipfile.ZipFile(folder / f"{name}-1.0-{tags}.whl", "w") as made:
        made.writestr(f"{module}/__init__.py", "")
        made.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")


def test_packages_that_lack_are_named_and_come_from_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, wheels = tmp_path / "site", tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setattr(packages, "SITE", site)
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setattr(packages, "REQUIREMENTS", {"lacked_one": None, "deepspeed": "deepspeed", "lacked_two": "two>1"})
    refusal = packages.prepare_packages(None)
    assert "lacks lacked_one, lacked_two, and no folder of wheels was given: bring them" in refusal
    assert refusal.endswith("-d wheels lacked-one 'two>1'")
    built, other = packages.bring_commands(["deepspeed", "lacked_one"], "3.99")
    assert built.endswith("-w wheels deepspeed") and " --python-version 3.99 --platform manylinux" in other
    wheel(wheels, "lacked_one", "py3-none-any", "lacked_one")
    wheel(wheels, "two", "cp30-cp30-linux_x86_64", "lacked_two")
    wheel(wheels, "torch", "py3-none-any", "torch")
    assert f"lacks lacked_two, and {wheels} has no wheel of them for {packages.TAG}: " in packages.prepare_packages(
        wheels
    )
    wheel(wheels, "two", "cp38-abi3-linux_x86_64", "lacked_two")
    assert packages.prepare_packages(wheels) == ""
    assert not (site / "torch").exists(), "the image's own packages stay"
    (wheels / "three-1.0-py3-none-any.whl").write_text("no archive")
    assert "three-1.0-py3-none-any.whl cannot be unpacked" in packages.prepare_packages(wheels)


def test_without_a_gpu_one_line_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "will_use_cuda", lambda _: False)
    with pytest.raises(SystemExit, match=r"^0$"):
        main("facts", [Step("one", f"{HERE}:table_that_ends", 1)], [])
    assert capsys.readouterr().out == "no CUDA GPU here: nothing was run\n"
