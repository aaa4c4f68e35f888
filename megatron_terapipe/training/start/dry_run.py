"""A dry run: all checks of a run that need neither its devices nor its hosts, and the lines that it prints."""

from deepspeed_ext.runtime.launch.environment import LaunchEnvironment
from megatron_terapipe.config import Config
from megatron_terapipe.training.start.absent_files import absent_files, without_files
from megatron_terapipe.training.start.run import prepare
from megatron_terapipe.training.start.run_in_words import START, rows_of_run, table, warnings_of_run


def dry_run(config: Config, launch: LaunchEnvironment) -> list[str]:
    """Lines that say what would run, once every check has passed.

    Args:
        launch: this process, and how many ranks the run has.

    Raises:
        UserError: if anything does not fit.
    """
    if not config.training.dry_run_without_files:
        run = prepare(config, launch)
        return [*_lines(rows_of_run(run), ["devices", "hosts"]), *warnings_of_run(run)]
    run = prepare(without_files(config), launch)
    # Which weights it starts with is written in checkpoints, and they are not here.
    rows = {name: text for name, text in rows_of_run(run).items() if name != START}
    return _lines(rows, ["devices", "hosts", *absent_files(config)])


def _lines(rows: dict[str, str], unchecked: list[str]) -> list[str]:
    rows = rows | {"not checked here": ", ".join(unchecked)}
    return ["dry run: every check passed, and nothing was started", *table(rows)]
