"""What the command reads and writes, with errors in one line."""

from pathlib import Path

from deepspeed_ext.plan.errors import UserError


def read(path: Path) -> str:
    """The text of a file.

    Raises:
        UserError: if it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {_reason(error)}") from None


def write(path: Path, text: str) -> None:
    """Write a text file.

    Raises:
        UserError: if it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
