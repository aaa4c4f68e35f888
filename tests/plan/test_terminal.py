"""The line of progress of a command."""

import io
import json
import sys
from itertools import pairwise

import pytest
from rich.table import Table
from rich.text import Text

from deepspeed_ext.plan.costs import attention_costs
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.solve import PolynomialCosts, solve_stages, solve_token_slices
from deepspeed_ext.plan.terminal import (
    STANDARD_OUTPUT,
    ProgressLine,
    exact_output,
    no_progress,
    printable_output,
    run_command,
    write_json,
)
from megatron_terapipe.console import output_console


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_only_a_terminal_shows_the_progress_and_it_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    with ProgressLine() as line:
        assert line.part("searching") is no_progress
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with printable_output(), ProgressLine() as line:
        line.part("searching", 0.5, 1.0)(0.2)
    assert "searching" in terminal.getvalue() and "60%" in terminal.getvalue()
    assert "u001b" not in terminal.getvalue(), "the line controls the terminal"
    assert terminal.getvalue().rstrip().endswith("\x1b[2K"), "the line is erased"


def test_searches_report_a_share_that_rises() -> None:
    from deepspeed_ext.plan.solve.orders import optimise

    shape, shares = PipelineShape(2, 2, 2), []
    costs = PolynomialCosts.of_layers([1, 1], 64, 0.5)
    optimise(shape, attention_costs(shape, (0.5, 0.5), 0.5), effort=1e-6, progress=shares.append)
    solve_token_slices(shape, 64, costs, effort=1e-4, progress=shares.append)
    solve_stages(
        shape, 4, 64, lambda layers: PolynomialCosts.of_layers(layers, 64, 0.5), effort=1e-4, progress=shares.append
    )
    assert len(shares) > 50 and all(0 <= share <= 1 for share in shares)
    falls = sum(after < before for before, after in pairwise(shares))
    assert falls == 2, "only where the next search begins"


HOSTILE = "a\x1b[2J\x1b]0;title\x07\x9b2J\u202eb\r\u2066c\x08é\t"
SHOWN = r"a\u001b[2J\u001b]0;title\u0007\u009b2J\u202eb\u000d\u2066c\u0008é" + "\t"


def test_control_characters_are_printed_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    def action() -> int:
        print(HOSTILE)
        print(HOSTILE, file=sys.stderr)
        print("\r 50% of a bar", end="", file=sys.stderr)
        table = Table("name")
        table.add_row(HOSTILE)
        table.add_row(Text(HOSTILE))
        output_console().print(table, HOSTILE, style="bold")
        write_json(STANDARD_OUTPUT, json.dumps(HOSTILE, ensure_ascii=False))
        return 0

    assert run_command(action) == 0
    out, err = capsys.readouterr()
    assert err == f"{SHOWN}\n\r 50% of a bar"
    lines = out.splitlines()
    assert lines[0] == SHOWN and json.loads(lines[-1]) == HOSTILE
    assert sum(r"a\u001b[2J" in line for line in lines) == 5
    assert all(each.isprintable() or each == "\t" for each in out.replace("\n", ""))


def test_characters_that_an_output_cannot_encode_are_printed_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = [io.TextIOWrapper(io.BytesIO(), encoding="ascii") for _ in range(2)]
    for name, output in zip(("stdout", "stderr"), outputs, strict=True):
        monkeypatch.setattr(sys, name, output)
    with printable_output():
        print("\N{SNOWMAN}")
        print("\N{SNOWMAN}", file=sys.stderr)
        exact_output().write("\N{MIDDLE DOT}")
    for output in outputs:
        output.flush()
    assert [output.buffer.getvalue() for output in outputs] == [b"\\u2603\n\\xb7", b"\\u2603\n"]


def test_styles_reach_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    run_command(lambda: output_console().print(f"[bold]{HOSTILE}[/]") or print(HOSTILE, file=exact_output()) or 0)
    assert "\x1b[1ma" in terminal.getvalue()
    assert "\x1b[2J" not in terminal.getvalue() and "\u202e" not in terminal.getvalue()


def test_text_for_a_file_is_exact(capfd: pytest.CaptureFixture[str]) -> None:
    run_command(lambda: print(HOSTILE, file=exact_output()) or 0)
    assert capfd.readouterr().out == f"{HOSTILE}\n"
