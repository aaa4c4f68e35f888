"""Command `report`: the report of training runs, as a page, as JSON and as text."""

import argparse
import json
import sys
from contextlib import suppress
from pathlib import Path

from deepspeed_ext.plan.terminal import STANDARD_OUTPUT, CommandParser, add_json_flag, command_main, write_json
from deepspeed_ext.plan.text_files import write_text
from megatron_terapipe.errors import ConfigError

EPILOG = """
examples:
  %(prog)s runs/a --output report.html
  %(prog)s runs/a/metrics.jsonl --search plan --json
  %(prog)s runs/a runs/b --output compared.html
"""

DESCRIPTION = """Write the report of a training run: main figures, predicted and measured values, the parts of an
iteration, curves and incidents. The answer of the search and the measured timeline are read from the places that the
run recorded."""


def build_parser(prog: str) -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser(prog=prog, description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="metrics file of a run (--metrics-file), or a directory with metrics.jsonl",
    )
    parser.add_argument("--output", metavar="FILE", help="write the page to this file")
    parser.add_argument(
        "--search",
        metavar="PATH",
        help="answer of the search, or its directory (default: beside the run's strategy)",
    )
    parser.add_argument("--timeline", metavar="PATH", help="measured timeline (default: where the run wrote it)")
    parser.add_argument("--join", action="store_true", help="join files of one run that was resumed, in their order")
    add_json_flag(parser, "the figures")
    parser.add_argument(
        "--schema",
        choices=("report", "metrics"),
        help="print the JSON Schema of --json, or of a line of the metrics file",
    )
    return parser


def _run(options: argparse.Namespace, prog: str) -> int:
    # Imported after the check of the flags, because pydantic is slow to import.
    from pydantic import TypeAdapter

    from megatron_terapipe.run_report.metrics_file import metrics_schema
    from megatron_terapipe.run_report.page import render_report
    from megatron_terapipe.run_report.report import ReportDocument, read_report, report_document, summary

    if options.schema is not None:
        of_report = TypeAdapter(ReportDocument).json_schema
        print(json.dumps(of_report() if options.schema == "report" else metrics_schema(), indent=2))
        return 0
    if options.json not in (None, STANDARD_OUTPUT):
        _refuse_to_replace_a_run(Path(options.json))
    if not options.runs:
        raise ConfigError(f"no run is given: give the file that it wrote with --metrics-file, see {prog} --help")
    if len(options.runs) > 1 and not options.join:
        for name in ("search", "timeline"):
            if getattr(options, name) is not None:
                raise ConfigError(f"--{name} {getattr(options, name)} is of one run, and {len(options.runs)} are given")
    reports = read_report(options.runs, join=options.join, search=options.search, timeline=options.timeline)
    if options.output is not None:
        write_text(options.output, render_report(reports), "--output", make_folder=True)
    if options.json is not None:
        write_json(options.json, json.dumps(report_document(reports), indent=2, ensure_ascii=False))
    if options.json == STANDARD_OUTPUT:
        return 0
    print(summary(reports))
    if options.output is not None:
        print(f"report: {options.output} (in a browser)")
    return 0


def _refuse_to_replace_a_run(path: Path) -> None:
    """Raise a `ConfigError` if the file of `--json` is a metrics file, as in `report --json RUN`.

    The first line of a metrics file is a whole JSON object.
    """
    is_run = path.is_dir()
    if path.is_file():
        with suppress(OSError, ValueError, RecursionError), path.open(encoding="utf-8") as file:
            is_run = isinstance(json.loads(file.readline(2**20)), dict)
    if is_run:
        raise ConfigError(f"--json {path} is a run, which the figures would replace: give the runs first, or --json -")


main = command_main(build_parser, _run, "python -m megatron_terapipe.run_report")

if __name__ == "__main__":
    sys.exit(main())
