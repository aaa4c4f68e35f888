"""The report that a run writes of itself when it ends, never at the cost of the run."""

from pathlib import Path

from megatron_terapipe.config import LoggingConfig


def write_own_report(logging: LoggingConfig, rank: int) -> None:
    """Write the report of a run that has ended, if it was asked for; where that fails, say so in one line.

    Args:
        logging: says which file, if any.
        rank: of this process; the first one writes.
    """
    if logging.report is None or logging.metrics_file is None or rank or not Path(logging.metrics_file).is_file():
        return
    try:
        _write_report(logging.metrics_file, logging.report)
    except Exception as error:  # The run is done, whatever is wrong with its report.
        reason = " ".join(str(error).split()) or type(error).__name__
        print(f" warning: --report {logging.report} was not written ({reason})", flush=True)
    else:
        print(f" wrote the report {logging.report}", flush=True)


def _write_report(metrics_file: str, path: str) -> None:
    # Imported at the end of a run: it takes pydantic, and a while.
    from deepspeed_ext.plan.text.text_files import write_text
    from megatron_terapipe.run_report.output.page import render_report
    from megatron_terapipe.run_report.report import Sources, read_report

    # A launcher that ends all ranks because one has failed leaves no half of a page.
    part = Path(f"{path}.part")
    write_text(part, render_report(read_report(Sources(runs=[metrics_file]))), make_folder=True)
    part.replace(path)
