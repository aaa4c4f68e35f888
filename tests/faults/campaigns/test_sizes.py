"""The short form of the campaign: the same sizes, given to the same functions in this process."""

import os
from pathlib import Path

import pytest

import pretrain_gpt
from deepspeed_ext.plan.command import main as plan
from megatron_terapipe.search.__main__ import main as search
from tests.faults.campaigns.sizes import PLANNED, SEARCHED, TRAINED, Size


@pytest.mark.parametrize("size", (*TRAINED, *SEARCHED, *PLANNED), ids=lambda size: size.fault[:40])
def test_an_absurd_size_is_one_line(
    size: Size, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    words = size.argv(tmp_path)
    if size in TRAINED:
        code = pretrain_gpt.main(words[1:])
    else:
        code = (search if size in SEARCHED else plan)(words[2:])
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert code == 2 and len(lines) == 1
    assert lines[0].startswith("error: ") and size.line in lines[0]
