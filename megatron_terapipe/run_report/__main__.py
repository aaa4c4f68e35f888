"""Command `report`: the report of training runs, as a page, as JSON, and on one screen."""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from deepspeed_ext.plan.terminal import STANDARD_OUTPUT, CommandParser, add_json_flag, run_command, write_json
from deepspeed_ext.plan.text_files import write_text
from megatron_terapipe.errors import ConfigError

PROGRAM = "python -m megatron_terapipe.run_report"

EPILOG = """
examples:
  %(prog)s runs/a --output report.html
  %(prog)s runs/a/metrics.jsonl --search plan --json
  %(prog)s runs/a runs/b --output compared.html
"""

DESCRIPTION = """Write the report of a training run: figures at a glance, curves, what the search promised beside what
came, where an iteration goes, and what happened. The answer of the search and the measured timeline are found where the
run says that they are."""


def build_parser(prog: str = PROGRAM) -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser(prog=prog, description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="metrics file of a run (--metrics-file), or a directory with metrics.jsonl",
    )
    parser.add_argument("--output", metavar="FILE", help="write the page to this file")
    parser.add_argument("--pictures", metavar="DIR", help="write each chart as an SVG picture into this directory")
    parser.add_argument(
        "--search", metavar="PATH", help="answer of the search, or its directory. Default: beside the run's strategy"
    )
    parser.add_argument("--timeline", metavar="PATH", help="measured timeline. Default: where the run wrote it")
    parser.add_argument(
        "--join", action="store_true", help="the files are pieces of one run that was resumed, in their order"
    )
    add_json_flag(parser, "the figures")
    parser.add_argument(
        "--schema",
        choices=("report", "metrics"),
        help="print a JSON Schema: that of --json, or that of a line of the metrics file",
    )
    return parser


def main(argv: Sequence[str] | None = None, prog: str = PROGRAM) -> int:
    """Run the command, and return its exit code: 2 for bad input, said in one line.

    Args:
        argv: its words; None = those of this process.
    """
    return run_command(lambda: _run(build_parser(prog).parse_args(argv), prog))


def _run(options: argparse.Namespace, prog: str) -> int:
    # Imported once the words are known to be good: checks of lines take pydantic, which takes a while.
    from megatron_terapipe.page.chart import chart_picture
    from megatron_terapipe.run_report.metrics_file import metrics_schema
    from megatron_terapipe.run_report.page import charts_of, render_report
    from megatron_terapipe.run_report.report import Sources, json_schema, read_report, report_document
    from megatron_terapipe.run_report.text import summary

    if options.schema is not None:
        print(json.dumps(json_schema() if options.schema == "report" else metrics_schema(), indent=2))
        return 0
    if options.json not in (None, STANDARD_OUTPUT):
        _refuse_to_replace_a_run(Path(options.json))
    if not options.runs:
        raise ConfigError(f"no run is named: give the file that it wrote with --metrics-file, see {prog} --help")
    if len(options.runs) > 1 and not options.join:
        for name in ("search", "timeline"):
            if getattr(options, name) is not None:
                raise ConfigError(f"--{name} {getattr(options, name)} is of one run, and {len(options.runs)} are named")
    reports = read_report(
        Sources(runs=options.runs, join=options.join, search=options.search, timeline=options.timeline)
    )
    if options.output is not None:
        write_text(options.output, render_report(reports), "--output", make_folder=True)
    if options.pictures is not None:
        for name, chart in charts_of(reports).items():
            write_text(Path(options.pictures) / f"{name}.svg", chart_picture(chart), "--pictures", make_folder=True)
    if options.json is not None:
        write_json(options.json, report_document(reports).model_dump_json(indent=2))
    if options.json == STANDARD_OUTPUT:
        return 0
    print(summary(reports))
    if options.output is not None:
        print(f"report: {options.output} (in a browser)")
    return 0


def _refuse_to_replace_a_run(path: Path) -> None:
    """See that the file of `--json` is no metrics file: in `--json RUN` the run is taken for that file.

    Raises:
        ConfigError: if it is one, or a directory.
    """
    if path.is_dir() or (path.is_file() and _has_lines_of_json(path)):
        raise ConfigError(f"--json {path} is a run, which the figures would replace: name the runs first, or --json -")


def _has_lines_of_json(path: Path) -> bool:
    """Whether the first line of a file is a whole JSON object."""
    with suppress(OSError, ValueError, RecursionError), path.open(encoding="utf-8") as file:
        return isinstance(json.loads(file.readline()), dict)
    return False


if __name__ == "__main__":
    sys.exit(main())
