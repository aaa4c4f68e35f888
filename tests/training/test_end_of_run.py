"""Which rank reports how a run ends, its exit code, and the checkpoint of a run that torchrun may start again."""

import signal
from dataclasses import replace
from errno import ENAMETOOLONG
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.runtime.health.rank_watch import LOST
from deepspeed_ext.runtime.launch import AbsentRankError, MeetingError
from megatron_terapipe.checkpoint.directories import LATEST
from megatron_terapipe.checkpoint.info import RUN_FILE
from megatron_terapipe.config import CheckpointConfig
from megatron_terapipe.errors import AgreedCheckpointError, ConfigError, NumbersError, SearchError
from megatron_terapipe.training.end_of_run import LAUNCHER_REPORTS, EndOfRun, LostRank, after_restart

BEFORE, INSIDE = False, True
"""The process group."""

TOO_LONG = "error: x is longer than the name of a file may be\n"
LINE, INTERRUPTED = "error: wrong\n", "interrupted: the run had not begun: give the same command again\n"


@pytest.mark.parametrize(
    ("error", "in_process_group", "code", "lines"),
    [
        # Lines of ranks 0 and 1 on the first host, and of rank 2 on the second. Rank 1 ends first.
        (None, INSIDE, 0, ("", "", "")),
        (UserError("wrong"), BEFORE, 2, (LINE, "", LINE)),
        (ConfigError("wrong"), INSIDE, 2, ("", LINE, "")),
        (AgreedCheckpointError("wrong"), BEFORE, 2, (LINE, "", "")),
        (AgreedCheckpointError("wrong"), INSIDE, 2, (LINE, "", "")),
        (NumbersError("wrong"), INSIDE, 2, (LINE, "", "")),
        (SearchError("wrong"), BEFORE, 2, (LINE, "", "")),
        (OSError(ENAMETOOLONG, "too long", "x"), BEFORE, 2, (TOO_LONG, "", TOO_LONG)),
        (OSError(ENAMETOOLONG, "too long", "x"), INSIDE, 2, ("", TOO_LONG, "")),
        (MeetingError("wrong"), INSIDE, 2, ("", LINE, "")),
        (AbsentRankError("wrong"), BEFORE, 75, ("", LINE, "")),
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
    capfd: pytest.CaptureFixture[str],
) -> None:
    for rank, line in enumerate(lines):
        for name, value in {"RANK": rank, "LOCAL_RANK": rank % 2, "WORLD_SIZE": 4, "LOCAL_SIZE": 2}.items():
            monkeypatch.setenv(name, str(value))
        called: list[Any] = []
        with EndOfRun() as end:
            end.lost = called.append
            end.in_process_group = in_process_group
            end.rank_watch = SimpleNamespace(ends_first=rank == 1, __exit__=lambda *error: None)
            end.after_report.callback(lambda after: after.append(capfd.readouterr().err), called)
            if error is not None:
                raise error
        assert end.code == code
        # What follows the report follows it, and a rank that has lost another one leaves at once.
        assert called == (["rank 1 died"] if code == LOST else [line])


@pytest.mark.parametrize("by_launcher", [False, True])
def test_the_first_ctrl_c_prints_at_once_and_later_signals_are_ignored(
    by_launcher: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if by_launcher:
        monkeypatch.setenv(LAUNCHER_REPORTS, "save")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Ignored in jobs that a shell runs in the background.
    with EndOfRun() as end:
        end.remedy = lambda: "REMEDY"
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            assert capfd.readouterr().err == ("" if by_launcher else "interrupted: REMEDY\n")
            end.print_interrupted()  # In the thread of the watch.
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
    assert end.code == 130 and not capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


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


FIRST = {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RESTART_COUNT": "0", "GROUP_WORLD_SIZE": "1"}
AGAIN = FIRST | {"TORCHELASTIC_RESTART_COUNT": "1"}
HOSTS = {"GROUP_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "False"}


@pytest.fixture
def saved(tmp_path: Path) -> str:
    (tmp_path / "global_step5").mkdir()
    (tmp_path / "global_step5" / RUN_FILE).write_text("{}")
    (tmp_path / LATEST).write_text("global_step5")
    return str(tmp_path)


@pytest.mark.parametrize(
    ("load", "environment", "changes"),
    [
        ("pretrained", {}, False),
        ("pretrained", AGAIN | {"TORCHELASTIC_MAX_RESTARTS": "0"}, False),
        (None, AGAIN, True),
        ("pretrained", AGAIN, True),
        # It loads from its own directory.
        *(("SAVED/", environment, False) for environment in (FIRST, AGAIN, AGAIN | HOSTS)),
    ],
)
def test_a_restarted_run_resumes_from_its_own_checkpoint(
    saved: str, load: str | None, environment: dict[str, str], changes: bool
) -> None:
    finetunes = load == "pretrained"
    config = CheckpointConfig(save=saved, load=load and load.replace("SAVED", saved), finetune=finetunes)
    found = after_restart(config, environment)
    assert found == CheckpointConfig(save=saved, load=saved) if changes else found is config
    if changes:  # Not before its first checkpoint.
        none = replace(config, save=f"{saved}/none")
        assert after_restart(none, environment) is none


@pytest.mark.parametrize(
    ("flags", "environment", "part"),
    [
        ({"save": True}, {}, "global_step5 of another run"),
        ({"save": True, "load": True, "ckpt_step": 3}, {}, "global_step5 of another run"),
        ({"save": True, "load": True, "finetune": True}, {}, "global_step5 of another run"),
        ({}, {}, "--max-restarts 3 has no checkpoints"),
        (
            {"save": True, "load": True},
            HOSTS | {"TORCHELASTIC_USE_AGENT_STORE": "True"},
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        ),
    ],
)
def test_refused_restarts(saved: str, flags: dict[str, Any], environment: dict[str, str], part: str) -> None:
    config = CheckpointConfig(
        **{name: saved if value is True and name != "finetune" else value for name, value in flags.items()}
    )
    with pytest.raises(ConfigError, match=part):
        after_restart(config, FIRST | environment)
