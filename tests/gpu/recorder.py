"""A plugin of pytest: a line of JSON when a test starts and when it ends, so that one that hangs leaves its name."""

import json
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="file of the lines")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder(config.getoption("--record")))


class Recorder:
    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(nodeid, "started")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self._write(report.nodeid, report.outcome, report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(report.nodeid, "failed", report)

    def _write(self, test: str, outcome: str, report: Any = None) -> None:
        message = ""
        if outcome == "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            lines = (crash.message if crash else str(report.longrepr)).strip().splitlines()
            message = (lines[:1] if crash else lines[-1:] or [""])[0]
        with self._path.open("a") as file:
            file.write(json.dumps({"test": test.rpartition("::")[2], "outcome": outcome, "message": message}) + "\n")
