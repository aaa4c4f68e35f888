"""Tests that need a CUDA device, each file in a process of its own: what one breaks, the next does not inherit."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.measuring.report import Section
from deepspeed_ext.runtime.cuda_environment import prepare_cuda_environment
from tests.gpu.pipelines import EXACT

ROOT = Path(__file__).parents[2]
_MARK = re.compile(r"^(@|    )pytest\.mark\.gpu,?$", re.MULTILINE)
_NO_WAIT, _ATTENTION = "test_no_wait_in_a_step.py", "test_attention_kernels.py"
_POLL_S = 1.0


def marked_files() -> list[str]:
    """Files with the mark. Only these are imported: others need packages that an image may lack."""
    found = (path for path in sorted(ROOT.glob("tests/**/test_*.py")) if _MARK.search(path.read_text("utf-8")))
    return [str(path.relative_to(ROOT)) for path in found]


def no_wait() -> Iterator[Section]:
    """The step in which torch refuses to wait, in eleven modes."""
    return rows([each for each in marked_files() if each.endswith(_NO_WAIT)])


def attention_tests() -> Iterator[Section]:
    """The attention kernels."""
    return rows([each for each in marked_files() if each.endswith(_ATTENTION)])


def other_tests() -> Iterator[Section]:
    """All other files."""
    return rows([each for each in marked_files() if not each.endswith((_NO_WAIT, _ATTENTION))])


def rows(files: Sequence[object]) -> Iterator[Section]:
    """Run the marked tests of files; yield the table after each test."""
    table = Section("Tests marked gpu", ("file", "passed", "failed", "skipped", "s", "result"))
    variables = os.environ | EXACT
    prepare_cuda_environment(variables, num_pipeline_ranks=1)
    with tempfile.TemporaryDirectory() as folder:
        for number, file in enumerate(files):
            record, start = Path(folder, str(number)), time.monotonic()
            record.touch()
            command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--tb=short", "-p", "no:cacheprovider"]
            process = subprocess.Popen(
                [*command, "-p", "tests.gpu.recorder", f"--record={record}", str(file)], cwd=ROOT, env=variables
            )
            table.rows.append(())
            code = None
            while code is None:
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(_POLL_S)
                events = [json.loads(line) for line in record.read_text().splitlines()]
                table.rows[-1] = (str(file), *_cells(events, time.monotonic() - start, code))
                yield table


def _cells(events: list[dict[str, str]], seconds: float, code: int | None) -> Iterator[str]:
    """Counts of a file, its seconds and its result; `code` is None while it runs."""
    ended = [each for each in events if each["outcome"] != "started"]
    counts = [sum(each["outcome"] == outcome for each in ended) for outcome in ("passed", "failed", "skipped")]
    yield from (*map(str, counts), f"{seconds:.0f}")
    bad = next((each for each in ended if each["outcome"] == "failed"), None)
    last = events[-1]["test"] if events else "its collection"
    if bad is not None:
        yield f"failed: {bad['test']}: {bad['message']}"
    elif code is None:
        # It stays in the table if the step ends here.
        yield f"failed: no end of {last}"
    elif code < 0 or (events and events[-1]["outcome"] == "started"):
        yield f"failed: pytest ended with {code} in {last}"
    elif not counts[0]:
        on_cpu = counts[2] and os.environ.get("DS_ACCELERATOR") == "cpu"
        yield "skipped" if on_cpu else f"failed: none ran, pytest ended with {code}"
    else:
        yield "ok"
