"""Which rank reports how a run ends, and its exit code."""

from typing import Any

import pytest

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.runtime.health.rank_watch import LOST
from megatron_terapipe.errors import AgreedCheckpointError, ConfigError, NumbersError, SearchError
from megatron_terapipe.training.end_of_run import EndOfRun
from megatron_terapipe.training.recovery import LostRank

BEFORE, INSIDE = False, True
"""The process group."""

LINE, INTERRUPTED = "error: wrong\n", "interrupted: no checkpoint was saved, so start again\n"


@pytest.mark.parametrize(
    ("error", "in_process_group", "code", "lines"),
    [
        # Lines of ranks 0 and 1 on the first host, and of rank 2 on the second.
        (None, INSIDE, 0, ("", "", "")),
        (UserError("wrong"), BEFORE, 2, (LINE, "", LINE)),
        (ConfigError("wrong"), INSIDE, 2, (LINE, LINE, LINE)),
        (AgreedCheckpointError("wrong"), BEFORE, 2, (LINE, "", "")),
        (AgreedCheckpointError("wrong"), INSIDE, 2, (LINE, "", "")),
        (NumbersError("wrong"), INSIDE, 2, (LINE, "", "")),
        (SearchError("wrong"), BEFORE, 2, (LINE, "", "")),
        (LostRank("rank 1 died"), INSIDE, LOST, ("", "", "")),
        (KeyboardInterrupt(), BEFORE, 130, (INTERRUPTED, "", INTERRUPTED)),
        (KeyboardInterrupt(), INSIDE, 130, (INTERRUPTED, "", INTERRUPTED)),
    ],
)
def test_ends(
    error: BaseException | None,
    in_process_group: bool,
    code: int,
    lines: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for rank, line in enumerate(lines):
        for name, value in {"RANK": rank, "LOCAL_RANK": rank % 2, "WORLD_SIZE": 4, "LOCAL_SIZE": 2}.items():
            monkeypatch.setenv(name, str(value))
        called: list[Any] = []
        with EndOfRun() as end:
            end.lost = called.append
            end.in_process_group = in_process_group
            end.after_report.callback(lambda after: after.append(capsys.readouterr().err), called)
            if error is not None:
                raise error
        assert end.code == code
        # What follows the report follows it, and a rank that has lost another one leaves at once.
        assert called == (["rank 1 died"] if code == LOST else [line])


def test_a_failure_of_the_program_passes(capsys: pytest.CaptureFixture[str]) -> None:
    called: list[str] = []
    with pytest.raises(RuntimeError, match="a bug"), EndOfRun() as end:
        end.after_report.callback(called.append, "after")
        raise RuntimeError("a bug")
    assert called == ["after"] and capsys.readouterr().err == ""


def test_variables_that_are_wrong_are_reported_by_every_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "many")
    with EndOfRun() as end:
        raise UserError("wrong")
    assert (end.code, capsys.readouterr().err) == (2, LINE)
