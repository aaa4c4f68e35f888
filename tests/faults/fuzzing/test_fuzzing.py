"""A short form of the campaign: real inputs, inputs that once broke a parser, and a few changed by chance."""

from pathlib import Path
from random import Random

import pytest

from deepspeed_ext.plan.errors import UserError
from tests.faults.fuzzing.edits import random_input, words_of
from tests.faults.fuzzing.target import Fault, Target, fault_of
from tests.faults.fuzzing.targets import targets

INPUTS = 25
"""Inputs by chance for each parser."""


@pytest.mark.parametrize("target", targets(), ids=lambda target: target.name)
def test_parsers_read_an_input_or_report_an_error(target: Target, tmp_path: Path) -> None:
    for seed in target.seeds:
        target.read(seed, tmp_path)
    folder = tmp_path / "scratch"
    folder.mkdir()
    random, words = Random(1), (*words_of(target.seeds), *target.words)
    for data in (*target.found, *(random_input(random, target.seeds, words) for _ in range(INPUTS))):
        assert fault_of(target, data, folder) is None, data


def _target(read: object) -> Target:
    return Target(name="", read=read, seeds=(b"1", b'{"a": [1, 2]}'), seconds=0.2)  # type: ignore[arg-type]


def _raise(error: BaseException) -> None:
    raise error


def _loop() -> None:
    while True:
        try:
            while True:
                pass
        except Exception:
            pass


def test_a_broken_promise_is_seen(tmp_path: Path) -> None:
    folder = tmp_path / "scratch"
    folder.mkdir()

    def fault(read: object) -> str:
        found = fault_of(_target(read), b"", folder)
        assert isinstance(found, Fault)
        return found.kind

    assert fault_of(_target(lambda data, folder: (folder / "x").write_bytes(data)), b"", folder) is None
    assert not list(folder.iterdir())
    assert fault_of(_target(lambda *_: _raise(UserError("a\nb"))), b"", folder) is None
    assert fault(lambda *_: _raise(ValueError("a"))).startswith("ValueError (")
    assert fault(lambda *_: _raise(SystemExit(2))).startswith("SystemExit (")
    assert fault(lambda *_: _loop()).startswith("takes more than 0.2 s")
    assert fault(lambda *_: (tmp_path / "outside").write_text("")).startswith("writes outside its folder")
    assert not (tmp_path / "outside").exists()


def test_edits_keep_documents_readable_often_enough() -> None:
    random, seeds = Random(1), (b'{"a": [1, 2], "b": {"c": "x"}}',)
    inputs = [random_input(random, seeds, words_of(seeds)) for _ in range(200)]
    assert sum(data.startswith(b"{") and data.endswith(b"}") for data in inputs) > 60
    assert len(set(inputs)) > 150
