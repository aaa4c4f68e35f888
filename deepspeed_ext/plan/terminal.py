"""Shared by all commands: the layout of help, errors in one line, a line of progress, the flag `--json [FILE]`."""

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import TextIOWrapper
from itertools import groupby
from shutil import get_terminal_size
from typing import Any, NoReturn, Self, TextIO, cast

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.text_files import write_text

Progress = Callable[[float], None]
"""Takes the share that is done of some work, from 0 to 1."""


def no_progress(share: float) -> None:
    """Ignore the share that is done."""


def part_of(progress: Progress, first: float, last: float) -> Progress:
    """Return a callback for the progress of a part of some work, between these shares of all of it."""
    return lambda share: progress(first + (last - first) * share)


class ProgressLine:
    """A line of progress on standard error, removed at the end; `shown`: None = if that is a terminal."""

    _bar: Any = None
    """The line as rich draws it; None where standard error is not a terminal."""

    def __init__(self, shown: bool | None = None) -> None:
        self._shown = sys.stderr is not None and sys.stderr.isatty() if shown is None else shown

    def __enter__(self) -> Self:
        if self._shown:
            # Imported only where it is used: most commands end before it is loaded.
            from rich.console import Console
            from rich.progress import Progress, TimeRemainingColumn

            columns = ("{task.description}", "{task.percentage:.0f}%", TimeRemainingColumn())
            self._bar = Progress(
                *columns,
                console=Console(stderr=True, force_terminal=True),
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._bar.add_task("", total=1.0)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def part(self, doing: str, first: float = 0.0, last: float = 1.0) -> Progress:
        """Return a callback for the progress of a part of the work.

        Args:
            first: share of all work that is done before it.
            last: share of all work that is done after it.
        """
        if self._bar is None:
            return no_progress
        (task,) = self._bar.task_ids
        return part_of(lambda share: self._bar.update(task, description=doing, completed=share), first, last)


_CONTROLS = re.compile("(?!\\A\r)[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Characters that clear a screen, move its cursor or change the order of a line; not the return that begins a bar."""


def printable(text: str) -> str:
    r"""Return a text with its control characters as JSON spells them, such as `\u001b`."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class _PrintableStream:
    """A stream on which the content of a file cannot control the terminal. Consoles of rich write to the one below."""

    def __init__(self, stream: Any) -> None:
        self.rich_proxied_file = getattr(stream, "rich_proxied_file", stream)

    def write(self, text: str) -> int:
        return int(self.rich_proxied_file.write(printable(text)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


def exact_output() -> TextIO:
    """Return standard output, on which text is unchanged in a file or a pipe."""
    return sys.stdout if sys.stdout.isatty() else getattr(sys.stdout, "rich_proxied_file", sys.stdout)


@contextmanager
def printable_output() -> Iterator[None]:
    """Print control characters as text, whatever prints them, and so those that the stream cannot encode."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    out, error = (each and cast("TextIO", _PrintableStream(each)) for each in (sys.stdout, sys.stderr))
    with redirect_stdout(out), redirect_stderr(error):
        yield


BAD_INPUT = 2
"""Exit code for bad input."""

INTERRUPTED = 130
"""Exit code of a command that ended by Ctrl-C, as in shells."""

WIDEST = 110
"""Columns of a help text at most: longer lines are hard to read."""


@printable_output()
def run_command(action: Callable[[], int]) -> int:
    """Return the exit code of a command: its own, 2 for bad input, 130 for Ctrl-C."""
    try:
        try:
            return action()
        finally:
            # A reader such as `head` may have closed the stream: that is noticed here, not when Python closes it.
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        # The reader has closed the stream. Python would raise the error again when it closes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        return INTERRUPTED


def command_main(
    build_parser: Callable[[str], argparse.ArgumentParser], run: Callable[[argparse.Namespace, str], int], prog: str
) -> Callable[..., int]:
    """Return the `main` of a command. It takes the words of the user (None = this process's) and the program.

    Args:
        build_parser: makes the parser, from the words that people type before the flags.
        run: does the work, from the options and those words, and returns the exit code.
        prog: these words, where `main` is given no others.
    """

    def main(argv: Sequence[str] | None = None, prog: str = prog) -> int:
        """Run the command and return its exit code: its own, 2 for bad input, 130 for Ctrl-C."""
        return run_command(lambda: run(build_parser(prog).parse_args(argv), prog))

    return main


def up_to(most: int) -> Callable[[str], int]:
    """Return the `type` of a flag of argparse that is a whole number from 1 to `most`."""

    def read(text: str) -> int:
        if text.isdecimal() and len(text) < 19 and 1 <= int(text) <= most:
            return int(text)
        raise argparse.ArgumentTypeError(f"{text[:80]} is not a whole number from 1 to {most:,}")

    return read


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that a misspelled one resembles most; None if it resembles none."""
    # Imported where something is misspelled.
    from difflib import get_close_matches

    found = get_close_matches(name.lower(), list(known), n=1)
    return found[0] if found else None


class CommandParser(argparse.ArgumentParser):
    """A parser with help that begins with the description, and with errors that are `UserError`s of one line.

    Its sub-commands are such parsers, too.
    """

    def __init__(self, **settings: Any) -> None:
        ours: dict[str, Any] = {"formatter_class": _HelpFormatter, "allow_abbrev": False}
        super().__init__(**ours | settings)
        self._optionals.title = "other flags"
        self._words: list[str] = []

    def error(self, message: str) -> NoReturn:
        """Raise the error, with the nearest flag or the command for help."""
        if message.startswith("the following arguments are required"):
            # Where the missing flag was misspelled, both are named.
            known = {*self._option_string_actions, "--"}
            wrong = [each for each in self._words if each.startswith("--") and each.partition("=")[0] not in known]
            message += f", and {' '.join(wrong)} is not a flag of this command" if wrong else ""
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        meant = nearest(unknown[1], self._option_string_actions) if unknown else None
        hint = f"did you mean {meant}?" if meant else f"see {self.prog} --help"
        raise UserError(f"{message}: {hint}")

    def parse_known_args(self, words: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse as argparse does, and keep the words for errors."""
        self._words = list(sys.argv[1:] if words is None else words)
        return super().parse_known_args(words, namespace)

    def format_usage(self) -> str:
        """Return the shortest command in one line: all that is required, and `[flags]` for all that is optional."""
        if self.usage:
            return f"usage: {self.usage}\n"
        groups = [each for each in self._mutually_exclusive_groups if each.required]
        of_groups = [each for group in groups for each in group._group_actions]
        needed = [each for each in self._actions if each.required or not each.option_strings or each in of_groups]
        formatter = argparse.HelpFormatter(self.prog, width=sys.maxsize)
        formatter.add_usage(None, needed, groups, "usage: ")
        return f"{formatter.format_help().rstrip()} [flags]\n"

    def format_help(self) -> str:
        """Return the help: description, usage, flags by group with the flags of every command last, and examples."""
        formatter = self._get_formatter()
        formatter.add_text(self.description)
        formatter.add_text(self.format_usage())
        for group in sorted(self._action_groups, key=lambda group: group is self._optionals):
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()


class _HelpFormatter(argparse.HelpFormatter):
    """Fills paragraphs to the width of the terminal, and leaves indented lines, such as examples, as they are."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=min(get_terminal_size().columns - 2, WIDEST))

    def _split_lines(self, text: str, width: int) -> list[str]:
        # A flag is not broken at a dash.
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False, break_long_words=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = textwrap.dedent(text).strip("\n").splitlines()
        blocks = groupby(lines, key=lambda line: not line.strip() or line.startswith((" ", "usage: ")))
        filled = (list(block) if verbatim else self._split_lines(" ".join(block), width) for verbatim, block in blocks)
        return textwrap.indent("\n".join(line.rstrip() for block in filled for line in block), indent)


STANDARD_OUTPUT = "-"
"""The value of the flag for standard output."""


def add_json_flag(group: argparse._ActionsContainer, content: str, *, default: str | None = None) -> None:
    """Add the flag.

    Args:
        group: flags of a command, or a group of them.
        default: file that is written without the flag; None = none is.
    """
    suffix = "" if default is None else f" (default: {default})"
    group.add_argument(
        "--json",
        metavar="FILE",
        nargs="?",
        const=STANDARD_OUTPUT,
        default=default,
        help=f"write {content} as JSON; without FILE, or with -, print only that{suffix}",
    )


def write_json(path: str, text: str) -> None:
    """Write the file of the flag, in a folder that is created if missing, or standard output."""
    text = text if text.endswith("\n") else f"{text}\n"
    if path == STANDARD_OUTPUT:
        sys.stdout.write(text)
    else:
        write_text(path, text, "--json", make_folder=True)
