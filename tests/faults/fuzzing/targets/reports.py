"""Files of a report: the metrics of a run, and the answer of the search."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megatron_terapipe.run_report.page import render_report
from megatron_terapipe.run_report.report import read_report, report_document, summary
from tests.faults.fuzzing.target import Target
from tests.run_report.made_up import whole_run, write_answer, write_timeline


def _text(lines: list[Any]) -> bytes:
    return "".join(json.dumps(line.as_json()) + "\n" for line in lines).encode()


WHOLE = whole_run()
RESTARTED = _text([*WHOLE[:3], WHOLE[0]])
RUN = _text([*WHOLE[:6], *WHOLE[10:12], WHOLE[28], WHOLE[29], WHOLE[30], *WHOLE[31:34]])


def _answer() -> bytes:
    with TemporaryDirectory() as folder:
        return write_answer(Path(folder) / "ranking.json").read_bytes()


ANSWER = _answer()


def _report(metrics: Path, search: Path | None = None) -> None:
    steps = metrics.with_name("timeline")
    if search is not None and not steps.exists():
        write_timeline(steps)
    given = {} if search is None else {"search": str(search), "timeline": str(steps)}
    reports = read_report([str(metrics)], **given)
    render_report(reports)
    json.dumps(report_document(reports), allow_nan=False, ensure_ascii=False).encode()
    summary(reports)


def _read_metrics(data: bytes, folder: Path) -> None:
    (folder / "metrics.jsonl").write_bytes(data)
    _report(folder / "metrics.jsonl")


def _read_answer(data: bytes, folder: Path) -> None:
    (folder / "metrics.jsonl").write_bytes(RUN)
    (folder / "ranking.json").write_bytes(data)
    _report(folder / "metrics.jsonl", folder / "ranking.json")


TARGETS = (
    Target(
        name="metrics",
        read=_read_metrics,
        seeds=(RUN, _text(WHOLE[:4]), RESTARTED),
        found=(
            RUN.replace(b'"time": 1000000000.0', b'"time": 1e17'),
            RUN.replace(b'"lm_loss": 10.0', b'"lm_loss": "1e308"'),
            RUN.replace(b"[3221225472, 2147483648]", b'["' + b"9" * 400 + b'"]'),
        ),
        words=(b"253402300800", b"-253402300800", b"1e17", b"1e39", b"64", b'"1e300"', b'"nan"'),
    ),
    Target(
        name="answer of the search",
        read=_read_answer,
        seeds=(ANSWER, ANSWER.replace(b'"seq_length": 32', b'"seq_length": 64').replace(b"[16, 16]", b"[32, 32]")),
        found=(
            ANSWER.replace(b'"host_copy_s"', b'"x"'),
            ANSWER.replace(b'"activations"', b'"x"'),
            ANSWER.replace(b'"iteration_time_s": 0.4', b'"iteration_time_s": 1e-320'),
        ),
        words=(b"64", b"[0.1]", b"1e-300", b"1e39"),
    ),
)
