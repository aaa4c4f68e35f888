"""The line that shows how far a command is."""

import io
from itertools import pairwise

import pytest

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


def test_a_terminal_sees_share_and_time_left() -> None:
    terminal, clock = Terminal(), Clock()
    with ProgressLine(terminal, clock) as line:
        show = line.part("searching", 0.5, 1.0)
        clock.now = 0.9
        show(0.2)
        assert not terminal.getvalue(), "what is done by then needs no line"
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
    assert not terminal.getvalue().rsplit("\r", 2)[1].strip(), "it is gone at the end"


def test_a_file_sees_nothing() -> None:
    stream, clock = io.StringIO(), Clock()
    with ProgressLine(stream, clock) as line:
        clock.now = 100.0
        show = line.part("searching")
        show(0.5)
    assert show is unseen
    assert not stream.getvalue()


@pytest.mark.parametrize(
    ("elapsed_s", "done", "words"), [(1, 0.5, "1 s"), (60, 0.1, "9 min"), (3600, 0.25, "3.0 h"), (5, 1.0, "0 s")]
)
def test_time_left(elapsed_s: float, done: float, words: str) -> None:
    assert time_left(elapsed_s, done) == words


def test_searches_tell_a_share_that_rises() -> None:
    from deepspeed_ext.plan.solve.orders import optimise

    shape, told = PipelineShape(2, 2, 2), []
    costs = PolynomialCosts.of_layers([1, 1], 64, 0.5)
    optimise(shape, attention_costs(shape, (0.5, 0.5), 0.5), effort=1e-6, progress=told.append)
    solve_token_slices(shape, 64, costs, effort=1e-4, progress=told.append)
    solve_stages(
        shape, 4, 64, lambda layers: PolynomialCosts.of_layers(layers, 64, 0.5), effort=1e-4, progress=told.append
    )
    assert len(told) > 50 and all(0 <= share <= 1 for share in told)
    falls = sum(after < before for before, after in pairwise(told))
    assert falls == 2, "only where the next search begins"
