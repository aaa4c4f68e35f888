"""Measurements as steps: each in a process of its own under a time limit, with results on disk after every row.

A command for one device is a table of steps, the most telling first, and ends within a total limit:

    STEPS = (
        Step("versions", "tests.gpu.facts:versions", limit_s=60),
        Step("products", "tests.gpu.facts:products", 90, {"rows": 2048}, on_cpu={"rows": 32}),
    )

    if __name__ == "__main__":
        sys.exit(main("facts", STEPS))

The function of a step is named as `module:function`, so that the table needs neither torch nor DeepSpeed: packages that
are missing are reported before anything is imported. It takes the arguments of its step and yields tables
(`report.Section`). A table that is yielded again, with more rows, replaces itself; all that was yielded is kept when
the step fails, dies or runs into its limit. Tables of several steps with one title and the same columns become one:

    def products(rows: int) -> Iterator[Section]:
        table = Section("Products", ("size", "us"))
        for size in SIZES:
            table.guarded(size, lambda size=size: (measured(rows, size),))
            yield table

    FOLDER/NAME.md, NAME.json    all tables so far, and last the table of steps: result, seconds, limit
    FOLDER/NAME.log              output of all steps; the stacks of a step at its limit

`--cpu` hides the devices and takes the arguments `on_cpu`; a step whose `on_cpu` is None is skipped.
"""

import argparse
import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.measuring.packages import LARGE, PYTHON, REQUIREMENTS, SITE, bring_commands, prepare_packages
from benchmarks.measuring.report import Section, has_gpu, one_line, progress, publish, software
from deepspeed_ext.runtime.cuda_environment import will_use_cuda

ROOT = Path(__file__).parents[2]
LIMIT_S = 540.0
"""Of a command, unless it is given: one GPU is often lent for ten minutes at a time."""

_LEAST_S = 10.0
"""Time left below which no step starts."""
_STACKS_S = 2.0
"""How long before its limit a step writes its stacks, also if it holds the interpreter."""


@dataclass(frozen=True)
class Step:
    """A part of a command that can fail or hang without the others."""

    name: str
    function: str
    """`module:function`."""
    limit_s: float
    """Longest time of the step; less if less of the command's time is left."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Of the function, as JSON has them."""
    on_cpu: Mapping[str, Any] | None = field(default_factory=dict)
    """Arguments that differ with `--cpu`; None if the step needs a device."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of the environment of its process."""


class Campaign:
    """The steps of a command, and their results so far."""

    def __init__(self, name: str, folder: Path, *, cpu: bool, limit_s: float = LIMIT_S) -> None:
        self.name, self._folder, self._cpu = name, folder, cpu
        self._end = time.monotonic() + limit_s
        self._limit_s = limit_s
        self._software: dict[str, str] = {}
        self._sections: list[Section] = []
        self._steps = Section("Steps", ("step", "result", "s", "limit, s"))
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / f"{name}.log"
        self._log.write_text("")

    def run(self, step: Step) -> None:
        """Run a step, and write the results."""
        start, left = time.monotonic(), self._end - time.monotonic()
        limit_s = min(step.limit_s, left)
        if self._cpu and step.on_cpu is None:
            result = "skipped: needs a device"
        elif left < _LEAST_S:
            result = f"skipped: the {self._limit_s:g} s of this command are over"
        else:
            progress(f"{step.name}, at most {limit_s:.0f} s")
            result = self._run(step, limit_s)
        seconds = time.monotonic() - start
        progress(f"{step.name}: {result}, {seconds:.0f} s")
        self._steps.add(step.name, result, f"{seconds:.1f}", f"{limit_s:.0f}")
        self.publish()

    def publish(self) -> str:
        """Write all tables, and return the markdown."""
        return publish(self.name, self._software, [*self._sections, self._steps], self._folder, self.name)

    @property
    def failed(self) -> bool:
        """Whether a row of a table begins with a failure."""
        rows = (row for each in (*self._sections, self._steps) for row in each.rows)
        return any(cell.startswith(("failed", "HUNG")) for row in rows for cell in row)

    def _run(self, step: Step, limit_s: float) -> str:
        with tempfile.TemporaryDirectory() as folder, self._log.open("a") as log:
            results = Path(folder, "results.json")
            print(f"\n=== {step.name}", file=log, flush=True)
            arguments = {**step.arguments, **(step.on_cpu or {})} if self._cpu else step.arguments
            task = {"function": step.function, "arguments": arguments, "cpu": self._cpu, "limit_s": limit_s}
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.measuring.steps", str(results), json.dumps(task)],
                cwd=ROOT,
                env=self._environment(step),
                stdout=log,
                stderr=log,
                # Ranks that a step starts end with it.
                start_new_session=True,
            )
            try:
                code = process.wait(timeout=limit_s)
                result = "ok" if code == 0 else self._reason(code)
            except subprocess.TimeoutExpired:
                result = f"HUNG: no end within {limit_s:.0f} s"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                # A process within a call of the driver may outlive the signal; the next step runs nevertheless.
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=10)
            self._take(results)
        return result

    def _reason(self, code: int) -> str:
        if code < 0:
            return f"failed: ended by {signal.Signals(-code).name}"
        own = self._log.read_text(errors="replace").rpartition("\n=== ")[2]
        return f"failed: {one_line(own.rpartition('Traceback (most recent call last):')[2])}"

    def _take(self, results: Path) -> None:
        if not results.exists():
            return
        found = json.loads(results.read_text())
        self._software |= found["software"]
        for each in found["sections"]:
            table = Section(**{**each, "rows": [tuple(row) for row in each["rows"]]})
            same = [kept for kept in self._sections if (kept.title, kept.columns) == (table.title, table.columns)]
            if not same:
                self._sections.append(table)
            for kept in same:
                kept.rows += table.rows
                kept.notes += [note for note in table.notes if note not in kept.notes]

    def _environment(self, step: Step) -> dict[str, str]:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"), str(SITE))))
        found = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **step.variables}
        return found | ({"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""} if self._cpu else {})


def main(
    name: str,
    steps: Sequence[Step],
    argv: Sequence[str] | None = None,
    *,
    description: str = "",
    limit_s: float = LIMIT_S,
) -> int:
    """Run the steps of a command line. Returns 1 if something failed or hung, 2 if packages are missing, else 0.

    Raises:
        SystemExit: with 0, if there is nothing to run.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="run on CPUs over gloo, to try the program itself")
    parser.add_argument(
        "--step", nargs="+", metavar="NAME", help="only these steps", choices=[each.name for each in steps]
    )
    parser.add_argument("--limit", type=float, default=limit_s, metavar="SECONDS", help="of all steps (%(default)g)")
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"), help="folder of the results (%(default)s)")
    parser.add_argument(
        "--wheels", type=Path, metavar="FOLDER", help="take missing packages from wheels in this folder"
    )
    parser.add_argument(
        "--bring",
        nargs="?",
        const=PYTHON,
        metavar="3.12",
        help="print the commands that fill a folder of wheels for a machine without a network and its Python, and end",
    )
    options = parser.parse_args(argv)
    if options.bring:
        print(*bring_commands([each for each in REQUIREMENTS if each not in LARGE], options.bring), sep="\n")
        sys.exit(0)
    if not (options.cpu or will_use_cuda(os.environ)):
        print("no CUDA GPU here: nothing was run")
        sys.exit(0)
    if refusal := prepare_packages(options.wheels):
        print(refusal, file=sys.stderr)
        return 2
    # An end by `timeout` ends the step, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    campaign = Campaign(name, options.output, cpu=options.cpu, limit_s=options.limit)
    for step in steps:
        if options.step is None or step.name in options.step:
            campaign.run(step)
    print(campaign.publish())
    return int(campaign.failed)


def run_here(results: Path, function: str, arguments: Mapping[str, Any], *, cpu: bool, limit_s: float) -> None:
    """Run the function of a step in this process, and write its tables after each that it yields."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(1.0, limit_s - _STACKS_S))
    module, _, name = function.partition(":")
    tables: Iterable[Section] = getattr(import_module(module), name)(**arguments)
    named, kept = dict[str, str](), list[Section]()
    if "torch" in sys.modules:
        if not (cpu or has_gpu()):
            raise RuntimeError("torch finds no CUDA device: run a python3 whose torch is built for CUDA, or give --cpu")
        named = software()
    try:
        for table in tables:
            if not any(table is each for each in kept):
                kept.append(table)
            _write(results, named, kept)
    finally:
        _write(results, named, kept)
    faulthandler.cancel_dump_traceback_later()


def _write(results: Path, named: Mapping[str, str], tables: Sequence[Section]) -> None:
    """Write tables at once, so that a process that ends now leaves the old file or the new one."""
    written = results.with_suffix(".new")
    written.write_text(json.dumps({"software": named, "sections": [asdict(each) for each in tables]}))
    written.replace(results)


if __name__ == "__main__":
    _task = json.loads(sys.argv[2])
    run_here(Path(sys.argv[1]), _task.pop("function"), _task.pop("arguments"), **_task)
