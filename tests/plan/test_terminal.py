"""The line of progress of a command."""

import io
from itertools import pairwise

import pytest

from deepspeed_ext.plan.costs import attention_costs
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.solve import PolynomialCosts, solve_stages, solve_token_slices
from deepspeed_ext.plan.terminal import ProgressLine, no_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_only_a_terminal_shows_the_progress_and_it_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    with ProgressLine() as line:
        assert line.part("searching") is no_progress
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with ProgressLine() as line:
        line.part("searching", 0.5, 1.0)(0.2)
    assert "searching" in terminal.getvalue() and "60%" in terminal.getvalue()
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
