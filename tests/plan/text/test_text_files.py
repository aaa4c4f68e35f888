"""Text files are read, or it is said in one line why they are not."""

from pathlib import Path

import pytest

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.text_files import read_text, write_text


def test_text_comes_back_without_the_mark_of_spreadsheets(tmp_path: Path) -> None:
    write_text(tmp_path / "f", "\ufeffä\n")
    assert read_text(tmp_path / "f") == "ä\n"


def test_what_is_not_utf_8_is_named_with_its_byte(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"ab\xff")
    with pytest.raises(UserError) as raised:
        read_text(tmp_path / "f", "--flag")
    assert str(raised.value) == f"--flag {tmp_path / 'f'} is not UTF-8 text (byte 2 is 0xff): mend the file"


@pytest.mark.parametrize("name", ["absent", "a\x00b", "n" * 300, "."])
def test_what_cannot_be_read_or_written_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"cannot be read \(.*\): give a file that can$"):
        read_text(tmp_path / name)
    if name != "absent":
        with pytest.raises(UserError, match=r"cannot be written \(.*\): name another file$"):
            write_text(tmp_path / name, "")
