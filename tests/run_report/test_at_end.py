"""The report that a run writes of itself costs the run nothing."""

from pathlib import Path

import pytest

from megatron_terapipe.config import LoggingConfig
from megatron_terapipe.errors import ConfigError, NumbersError
from megatron_terapipe.run_report.at_end import report_at_end
from tests.run_report.made_up import whole_run, write_lines


def logging_of(folder: Path) -> LoggingConfig:
    metrics = write_lines(folder / "metrics.jsonl", whole_run())
    return LoggingConfig(metrics_file=str(metrics), report=str(folder / "report.html"))


def test_it_is_written_when_the_run_ends_well_or_by_an_error(tmp_path: Path) -> None:
    with report_at_end(logging_of(tmp_path / "well"), rank=0):
        assert not (tmp_path / "well" / "report.html").exists()
    assert (tmp_path / "well" / "report.html").is_file()
    with pytest.raises(NumbersError), report_at_end(logging_of(tmp_path / "badly"), rank=0):
        raise NumbersError("the loss is nan")
    assert (tmp_path / "badly" / "report.html").is_file()


def test_the_first_rank_writes_it_and_only_if_asked(tmp_path: Path) -> None:
    with report_at_end(logging_of(tmp_path), rank=1), report_at_end(LoggingConfig(), rank=0):
        pass
    assert not (tmp_path / "report.html").exists()


def test_what_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logging = logging_of(tmp_path)
    (tmp_path / "report.html").mkdir()
    with report_at_end(logging, rank=0):
        pass
    (tmp_path / "metrics.jsonl").write_text("")
    with report_at_end(logging, rank=0):
        pass
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f" warning: --report {logging.report} was not written (") for line in lines)


def test_it_needs_metrics() -> None:
    with pytest.raises(ConfigError, match="has no metrics to read: add --metrics-file"):
        LoggingConfig(report="report.html")
