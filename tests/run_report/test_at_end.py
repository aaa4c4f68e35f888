"""The report that a run writes of itself costs the run nothing."""

from pathlib import Path

import pytest

from megatron_terapipe.config import LoggingConfig
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.run_report.at_end import write_own_report
from tests.run_report.made_up import whole_run, write_lines


def logging_of(folder: Path) -> LoggingConfig:
    metrics = write_lines(folder / "metrics.jsonl", whole_run())
    return LoggingConfig(metrics_file=str(metrics), report=str(folder / "report.html"))


def test_it_is_written_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logging = logging_of(tmp_path)
    write_own_report(logging, rank=0)
    assert (tmp_path / "report.html").read_text().endswith("</html>\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "report.html"]
    assert capsys.readouterr().out == f" wrote the report {logging.report}\n"


def test_the_first_rank_writes_it_and_only_if_asked(tmp_path: Path) -> None:
    write_own_report(logging_of(tmp_path), rank=1)
    write_own_report(LoggingConfig(), rank=0)
    assert not (tmp_path / "report.html").exists()


def test_what_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logging = logging_of(tmp_path)
    (tmp_path / "report.html").mkdir()
    write_own_report(logging, rank=0)
    (tmp_path / "metrics.jsonl").write_text("")
    write_own_report(logging, rank=0)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f" warning: --report {logging.report} was not written (") for line in lines)


def test_it_needs_metrics() -> None:
    with pytest.raises(ConfigError, match="has no metrics to read: add --metrics-file"):
        LoggingConfig(report="report.html")
