"""The line of progress of a command."""

import io
from itertools import pairwise

from deepspeed_ext.plan.costs import attention_costs
from deepspeed_ext.plan.ops import PipelineShape
from deepspeed_ext.plan.solve import PolynomialCosts, solve_stages, solve_token_slices
from deepspeed_ext.plan.terminal import ProgressLine, time_left, unseen


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_terminal_shows_share_and_time_left() -> None:
    terminal, clock = Terminal(), Clock()
    with ProgressLine(terminal, clock) as line:
        show = line.part("searching", 0.5, 1.0)
        clock.now = 0.9
        show(0.2)
        assert not terminal.getvalue(), "short work needs no line"
        clock.now = 30.0
        show(0.2)
        assert terminal.getvalue() == "\rsearching: 60%, about 20 s left"
        clock.now = 30.1
        show(0.3)
        assert terminal.getvalue().count("\r") == 1, "not at every step"
        clock.now = 60.0
        line.part("done")(2.0)
        assert terminal.getvalue().endswith("\rdone: 100%, about 0 s left     ")
    assert terminal.getvalue().endswith("\r")
    assert not terminal.getvalue().rsplit("\r", 2)[1].strip(), "it is removed at the end"
    stream = io.StringIO()
    with ProgressLine(stream, clock) as line:
        assert line.part("searching") is unseen
    words = [time_left(*each) for each in ((1, 0.5), (60, 0.1), (3600, 0.25), (5, 1.0))]
    assert words == ["1 s", "9 min", "3.0 h", "0 s"]


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
