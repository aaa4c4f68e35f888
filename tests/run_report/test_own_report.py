"""The report that a run writes: it never ends the run, and has the reason of its end."""

import json
import os
import signal
import threading
from pathlib import Path

import pytest

from megatron_terapipe.config import LoggingConfig
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.records import RunEnd
from megatron_terapipe.run_report import own_report
from megatron_terapipe.run_report.own_report import OwnReport
from tests.run_report.made_up import START, lines_of, whole_run, write_lines


def logging_of(folder: Path, lines: list[object] | None = None) -> LoggingConfig:
    metrics = write_lines(folder / "metrics.jsonl", whole_run() if lines is None else lines)
    return LoggingConfig(metrics_file=str(metrics), report=str(folder / "report.html"))


def ends(folder: Path) -> list[dict[str, object]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line.get("event") == "end"]


def test_it_is_written_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logging = logging_of(tmp_path)
    OwnReport(logging).write()
    assert (tmp_path / "report.html").read_text().endswith("</html>\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "report.html"]
    assert capsys.readouterr().out == f" wrote the report {logging.report}\n"


def test_it_is_written_only_if_asked_and_with_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    OwnReport(LoggingConfig()).write()
    OwnReport(LoggingConfig(metrics_file=str(tmp_path / "none"), report=str(tmp_path / "r"))).write()
    OwnReport(LoggingConfig(metrics_file=str(tmp_path / "none"))).write_end("killed", failed=True)
    assert (list(tmp_path.iterdir()), capsys.readouterr().out) == ([], "")
    with pytest.raises(ConfigError, match=r"--report report.html .*--metrics-file"):
        LoggingConfig(report="report.html")


def test_an_error_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logging = logging_of(tmp_path)
    (tmp_path / "report.html").mkdir()
    OwnReport(logging).write()
    (tmp_path / "metrics.jsonl").write_text("")
    OwnReport(logging).write()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f" warning: --report {logging.report} was not written (") for line in lines)
    assert not (tmp_path / "report.html.part").exists()


def test_the_first_reason_of_an_end_is_in_the_file_and_on_the_page(tmp_path: Path) -> None:
    logging = logging_of(tmp_path, [START, *lines_of(range(1, 8))])
    with Path(logging.metrics_file or "").open("a") as file:
        file.write('{"iteration": 8, "lm_lo')  # The last bytes of a killed rank.
    report = OwnReport(logging)
    report.write_end("rank 1 died", failed=True)
    report.write_end("terminated by SIGTERM", failed=False)
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["iteration"], last["reason"], last["failed"]) == (7, "rank 1 died", True)
    assert "rank 1 died" in (tmp_path / "report.html").read_text()
    assert "SIGTERM" not in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("failed", "reasons"), [(True, ["connection closed", "rank 1 died"]), (False, ["connection closed"])]
)
def test_only_a_failure_follows_the_reason_of_a_rank(tmp_path: Path, failed: bool, reasons: list[str]) -> None:
    met = RunEnd(iteration=7, reason="connection closed", failed=True)
    OwnReport(logging_of(tmp_path, [START, *lines_of(range(1, 8)), met])).write_end("rank 1 died", failed=failed)
    assert [end["reason"] for end in ends(tmp_path)] == reasons


def test_a_signal_does_not_interrupt_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = own_report._write_report
    before = signal.getsignal(signal.SIGTERM)

    def signalled(metrics_file: str, path: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        written(metrics_file, path)

    monkeypatch.setattr(own_report, "_write_report", signalled)
    OwnReport(logging_of(tmp_path)).write()
    assert (tmp_path / "report.html").exists()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_second_thread_waits_for_the_page_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, begun, proceed = OwnReport(logging_of(tmp_path)), threading.Event(), threading.Event()
    written = own_report._write_report

    def slowly(metrics_file: str, path: str) -> None:
        begun.set()
        assert proceed.wait(60)
        written(metrics_file, path)

    monkeypatch.setattr(own_report, "_write_report", slowly)
    first = threading.Thread(target=report.write_end, args=("the run has stalled", True))
    first.start()
    assert begun.wait(60)
    second = threading.Thread(target=report.write_end, args=("terminated by SIGTERM", False))
    second.start()
    assert second.is_alive()
    assert not (tmp_path / "report.html").exists()
    proceed.set()
    first.join()
    second.join()
    assert "the run has stalled" in (tmp_path / "report.html").read_text()


def test_it_takes_a_hundredth_of_the_time_of_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    takes_s, now_s, written_at = 0.5, [0.0], list[float]()

    def write(metrics_file: str, path: str) -> None:
        written_at.append(now_s[0])
        now_s[0] += takes_s
        raise OSError("disk full")

    monkeypatch.setattr(own_report, "_write_report", write)
    report = OwnReport(logging_of(tmp_path), lambda: now_s[0])
    for _ in range(400):
        now_s[0] += 1.0
        report.refresh_if_due()
    assert written_at[:2] == [100.0, 150.5]
    assert len(written_at) * takes_s <= now_s[0] / 100
