"""Text files that users name, with errors in one line."""

from pathlib import Path

from deepspeed_ext.plan.errors import UserError


def read_text(path: Path | str, flag: str = "") -> str:
    """Return the text of a file, without the byte order mark that spreadsheets write.

    Args:
        flag: flag that names it, for the error; "" = none does.

    Raises:
        UserError: if it cannot be read, or is not UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{flag} {path} cannot be read ({error.strerror}): give a file that can".lstrip()) from None
    except UnicodeDecodeError as error:
        place = f"byte {error.start} is {error.object[error.start]:#04x}"
        raise UserError(f"{flag} {path} is not UTF-8 text ({place}): mend the file".lstrip()) from None
    except ValueError as error:  # A name that no file can have.
        raise UserError(f"{flag} {path} cannot be read ({error}): give a file that can".lstrip()) from None


def write_text(path: Path | str, text: str, flag: str = "", *, make_folder: bool = False) -> None:
    """Write a text file in UTF-8.

    Args:
        flag: flag that names it, for the error; "" = none does.
        make_folder: make the folder of the file where there is none.

    Raises:
        UserError: if it cannot be written.
    """
    try:
        if make_folder:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:  # The latter is a name that no file can have.
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{flag} {path} cannot be written ({reason}): name another file".lstrip()) from None
