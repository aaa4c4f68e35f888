"""Runs all tests that need a CUDA device, and tells what came of them by file."""

import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.measuring.report import Section, progress
from deepspeed_ext.runtime.cuda_environment import prepare_cuda_environment
from tests.gpu.pipelines import EXACT

ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 3600
_NOTHING_FOUND = 5
"""Exit code of pytest where it collected no test."""


def section() -> Section:
    """The empty table."""
    return Section("Tests marked gpu", ("file", "passed", "failed", "skipped", "result"))


def add_rows(table: Section, paths: Sequence[object] = ("tests",)) -> None:
    """Run the marked tests under some paths, and append a row for each file."""
    progress("tests marked gpu")
    variables = os.environ | EXACT
    prepare_cuda_environment(variables, num_pipeline_ranks=1)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}"]
        try:
            done = subprocess.run(
                [*command, *map(str, paths)],
                cwd=ROOT,
                env=variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            table.add("all", "", "", "", f"HUNG: no end within {_TIMEOUT_S} s")
            return
        if not report.exists():
            last = done.stdout.strip().splitlines()[-1:] or ["nothing printed"]
            table.add("all", "", "", "", f"failed: pytest ended with {done.returncode}: {last[0]}")
            return
        _add(table, ElementTree.parse(report))
    if done.returncode == _NOTHING_FOUND:
        table.add("all", "", "", "", "failed: no test is marked")


def _add(table: Section, report: ElementTree.ElementTree) -> None:
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    first_failure: dict[str, str] = {}
    for case in report.iter("testcase"):
        file = case.get("classname", "?").replace(".", "/") + ".py"
        problem = next((case.find(kind) for kind in ("failure", "error") if case.find(kind) is not None), None)
        counts[file][1 if problem is not None else 2 if case.find("skipped") is not None else 0] += 1
        if problem is not None:
            first_failure.setdefault(file, f"failed: {case.get('name')}: {problem.get('message', '')}")
    for file, (passed, failed, skipped) in sorted(counts.items()):
        table.add(file, passed, failed, skipped, first_failure.get(file, "ok" if passed else "failed: none ran"))
