"""The progress bar: only on a terminal, and from where the run goes on."""

import io
import sys

import pytest

from megatron_terapipe.training.reporters import LogLines, ProgressBar
from tests.training.reporting.samples import ITERATION


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    bar = ProgressBar(done=6, train_iters=9)
    bar.iteration(ITERATION)
    LogLines(1, 9).note("a line above the bar")
    bar.close()
    return stream.getvalue()


def test_on_a_terminal_it_shows_where_the_run_is(monkeypatch: pytest.MonkeyPatch) -> None:
    text = drawn(monkeypatch, Terminal())
    assert "6/9" in text
    assert "7/9" in text


def test_elsewhere_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drawn(monkeypatch, io.StringIO()) == ""
