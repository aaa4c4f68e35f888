"""The flag `--json [FILE]`, with which every command gives its answer to programs.

With FILE the answer goes into a file, beside what the command prints. Without, or with `-`, it stands alone on standard
output.
"""

import argparse
import sys

from deepspeed_ext.plan.text.text_files import write_text

STANDARD_OUTPUT = "-"
"""The value of the flag that stands for standard output."""


def add_json_flag(group: argparse._ActionsContainer, content: str, *, default: str | None = None) -> None:
    """Add the flag.

    Args:
        group: flags of a command, or a group of them.
        default: file that is written without the flag; None = none is.
    """
    beside = "" if default is None else f" (default: {default})"
    group.add_argument(
        "--json",
        metavar="FILE",
        nargs="?",
        const=STANDARD_OUTPUT,
        default=default,
        help=f"write {content} as JSON; without FILE, or with -, print that alone{beside}",
    )


def write_json(path: str, text: str) -> None:
    """Write what the flag asks for, in a folder that is made where there is none, or onto standard output.

    Raises:
        UserError: if it cannot be written.
    """
    text = text if text.endswith("\n") else f"{text}\n"
    if path == STANDARD_OUTPUT:
        sys.stdout.write(text)
    else:
        write_text(path, text, "--json", make_folder=True)
