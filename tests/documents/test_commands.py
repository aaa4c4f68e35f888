"""Every command and every file that a document shows works, in the order of the document, in an empty folder.

Commands run in this process. Those that train are checked by `--dry-run`. Those that take minutes, or need what is not
at hand, are checked by their own parser; `NOT_RUN` says which, and why.
"""

import argparse
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from itertools import dropwhile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import pretrain_gpt
from megatron_terapipe.checkpoint.conversion import export_checkpoint
from megatron_terapipe.command.commands import COMMANDS
from megatron_terapipe.command.main import main as terapipe
from megatron_terapipe.command.train import split
from tests.architecture.sources import ROOT
from tests.data.trained_tokenizers import train_hugging_face
from tests.documents.blocks import blocks_of, inline_commands, written
from tests.end_to_end.launching import MODEL, TRAINING
from tests.huggingface.models import MODELS as TINY
from tests.huggingface.models import save, whole_model

pytest.importorskip("safetensors")
pytest.importorskip("yaml")
# Modules that other tests have imported are run as programs here.
pytestmark = pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")

NOT_SHOWN = {
    "git clone": "downloads",
    "pip install": "downloads",
    "pip wheel": "downloads",
    "python -m build": "downloads",
    "twine": "not a package of the tests",
    "pip uninstall": "changes this environment",
    "python -m venv": "makes another environment",
    ". .venv": "changes the shell",
    "cp ": "copies out of an environment",
    "docker": "needs its daemon",
}
"""Beginnings of commands that nothing is checked of."""
NOT_RUN = {
    r"-m (benchmarks|tests\.gpu)": "takes minutes",
    r"terapipe plan .*--schedule optimised": "takes minutes",
    r"terapipe plan .*--timeline": "shows a run that was recorded",
    r"terapipe doctor": "asks the hosts of a hostfile",
    r"terapipe (generate|convert)": "reads the checkpoint of a run",
    r"terapipe report": "reads the metrics of a run",
    r"terapipe search (measure|trial|validate)": "takes minutes, or reads what they measured",
    r"terapipe search rank .*--calibrate": "reads what was measured",
    r"examples/amp/run\.py": "reads the repository of AMP",
}
"""Commands of which only the flags are checked, by their own parser."""
NO_CODE = {
    "forward      slice 0 -- state -->": "drawing",
    "schedules.interleaved --+-->": "drawing",
    "stage 0 | F0.0": "drawing",
    "bubble ratio =": "formula",
    "token slices  makespan": "printed by an example",
    "refused: the schedule deadlocks": "printed by an example",
    "wrote speeches.jsonl": "printed by a command",
    "this run": "printed by a run",
    " iteration ": "printed by a run",
    " loaded checkpoint": "printed by a run",
    "The state of the Union and": "generated",
    "dry run: every check passed": "printed by a dry run",
    "error: --num-attention-heads 32": "printed by a run",
    "measuring on 2 ranks": "printed by a command",
    "         2.256": "printed by a command",
    "running 3 strategies": "printed by a command",
    "                         measured": "printed by a command",
    "position   batch": "parts of a ledger",
    "rank 0   layers 0-3": "drawing",
    "deepspeed_ext/plan/\n": "list of files",
    "search/\n": "list of files",
    "a product of K inputs": "formulas",
    "all-reduce of B bytes": "formulas",
    "rows of the rank with most": "formulas",
    "CUDA environment: set": "printed by a run",
    "error: the run has stalled": "printed by a run",
    "host          slots  cores": "printed by the doctor",
    "error: rank 5 (host node1": "printed by a run",
    "CUDA_DEVICE_MAX_CONNECTIONS=16": "file of DeepSpeed's launcher",
}
"""Beginnings of indented blocks that are no commands."""
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


TERAPIPE = "terapipe"


class _Parsed(BaseException):
    """The flags of a command are good."""


def parsed(parse: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `parse_args` that ends the command where it was successful."""

    def wrapped(*arguments: Any, **keywords: Any) -> None:
        parse(*arguments, **keywords)
        raise _Parsed

    return wrapped


def check_flags(words: list[str]) -> None:
    """Run `python words...` or `terapipe words...` until its flags are parsed."""
    parse = patch.object(argparse.ArgumentParser, "parse_args", parsed(argparse.ArgumentParser.parse_args))
    with patch.object(sys, "argv", words), parse, pytest.raises(_Parsed):
        if words[0] == TERAPIPE:
            terapipe(words[1:])
        elif words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__")
        else:
            runpy.run_path(str(ROOT / words[0]), run_name="__main__")


def run_python(words: list[str]) -> None:
    """Run `python words...`, which must end with exit code 0."""
    if words[0] == "-m":
        # Not as `__main__`, because processes that a command starts import its functions by name.
        module = import_module(words[1])
        module = import_module(f"{words[1]}.__main__") if hasattr(module, "__path__") else module
        assert module.main(words[2:]) == 0
        return
    with patch.object(sys, "argv", words), suppress_good_end():
        runpy.run_path(str(ROOT / words[0]), run_name="__main__")


@contextmanager
def suppress_good_end() -> Iterator[None]:
    """Let a script end with exit code 0."""
    try:
        yield
    except SystemExit as end:
        assert not end.code, f"exit code {end.code}"


def dry_run(flags: list[str]) -> None:
    """Check the flags of a training run; `...` stands for those of a tiny one."""
    if flags[0] == "...":
        tiny = [*MODEL, *TRAINING[:8], "--mock-data", "--pipeline-model-parallel-size", "2", "--num-token-slices", "4"]
        flags = [*tiny, *flags[1:]]
    with patch.dict(os.environ):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE"):
            os.environ.pop(name, None)
        assert pretrain_gpt.main([*flags, "--dry-run"]) == 0


def flags_of_script(words: list[str]) -> list[str]:
    """Return the flags that a shell script gives to the trainer."""
    for name in ("python", "deepspeed"):
        fake = Path("bin", name)
        fake.parent.mkdir(exist_ok=True)
        fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
        fake.chmod(0o755)
    path = f"{Path('bin').resolve()}:{os.environ['PATH']}"
    done = subprocess.run(words, capture_output=True, text=True, check=True, env={**os.environ, "PATH": path})
    lines = done.stdout.splitlines()
    return lines[[Path(line).name for line in lines].index("pretrain_gpt.py") + 1 :]


def check(words: list[str]) -> None:
    """Run a command, or check as much of it as can be."""
    line = shlex.join(words)
    if line.startswith(tuple(NOT_SHOWN)):
        return
    words = list(dropwhile(lambda word: word == "time" or re.match(r"[A-Z_]+=", word), words))
    match words:
        case ["make", *targets]:
            assert all(re.search(rf"^{target}:", MAKEFILE, re.MULTILINE) for target in targets)
        case ["deepspeed", *_] if "--module" in words:
            check_flags(["-m", *words[words.index("--module") + 1 :]])
        case ["deepspeed", "--num_accelerators", _, script] if script.startswith("examples/"):
            assert Path(script).exists()  # `tests/examples` runs them.
        case ["deepspeed" | "torchrun", *_]:
            dry_run(words[words.index("pretrain_gpt.py") + 1 :])
        case ["bash", _, *_]:
            dry_run(flags_of_script(words))
        case ["terapipe", "train", *flags] if not {"--help", "--help-all"} & {*flags}:
            dry_run(split(flags)[1])
        case ["terapipe", *rest]:
            if any(re.search(pattern, line) for pattern in NOT_RUN):
                check_flags(words)
            else:
                assert terapipe(rest) == 0
        case ["python", *rest]:
            only_flags = any(re.search(pattern, line) for pattern in NOT_RUN)
            (check_flags if only_flags else run_python)(rest)
        case _:
            raise AssertionError("not a command that this test knows")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: empty but for the examples and what readers bring."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    shutil.copy(ROOT / "hostfile.example", tmp_path / "hostfile")
    (tmp_path / "corpus.jsonl").write_text(f'{{"text": "{"The state of the Union is strong. " * 1000}"}}\n' * 40)
    for name in ("llama", "configs"):
        (tmp_path / name).mkdir()
    train_hugging_face(tmp_path / "llama")
    (tmp_path / "configs" / "125M.yml").write_text(
        '{"num-layers": 12, "hidden-size": 768, "num-attention-heads": 12, "seq-length": 2048,\n'
        ' "max-position-embeddings": 2048, "optimizer": {"type": "Adam", "params": {"lr": 6e-4}}}\n'
    )
    (tmp_path / "configs" / "local_setup.yml").write_text(
        '{"train_micro_batch_size_per_gpu": 2, "train_iters": 100, "data_path": "corpus", "vocab_file": "vocab.json",\n'
        ' "merge_file": "merges.txt"}\n'
    )
    _write_qwen(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _write_qwen(folder: Path) -> None:
    """A tiny Qwen 2.5 under the name of a large one."""
    model = replace(TINY["llama"], num_layers=4, add_qkv_bias=True, vocab_size=1024, max_position_embeddings=32768)
    export_checkpoint(save(whole_model(model), model, folder / "ours"), folder / "qwen2.5-7b", family="qwen2")
    train_hugging_face(folder / "qwen2.5-7b")


WITH_COMMANDS = [path for path in written() if any(block.language != "python" for block in blocks_of(path))]


@pytest.mark.parametrize("path", WITH_COMMANDS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_and_files(path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = [block for block in blocks_of(path) if block.language not in ("python", "diff")]
    commands = [(block, words) for block in blocks if block.language == "shell" for words in block.commands()]
    for block in blocks:
        if block.language not in ("shell", "text"):
            assert block.file_name, f"{block.where}: say in the paragraph before it what the file is called"
            assert any(block.file_name in words for _, words in commands), f"{block.where}: show what reads the file"
            (folder / block.file_name).write_text(block.text)
    for block, words in commands:
        try:
            check(words)
        except (Exception, SystemExit, pytest.fail.Exception) as error:
            said = capsys.readouterr().err.strip().splitlines()[-1:]
            raise AssertionError(f"{block.where}: {shlex.join(words)}: {error} {said}") from error


def test_what_is_not_run_is_shown_somewhere() -> None:
    blocks = [block for path in written() for block in blocks_of(path)]
    lines = [shlex.join(words) for block in blocks if block.language == "shell" for words in block.commands()]
    texts = [block for block in blocks if block.language == "text"]
    assert [block.where for block in texts if not block.text.startswith(tuple(NO_CODE))] == []
    assert all(any(block.text.startswith(start) for block in texts) for start in NO_CODE)
    assert all(any(re.search(pattern, line) for line in lines) for pattern in NOT_RUN)
    assert all(any(line.startswith(start) for line in lines) for start in NOT_SHOWN)


def test_commands_in_sentences_name_what_exists() -> None:
    commands = [words for path in written() for words in inline_commands(path)]
    assert len(commands) > 10
    assert [shlex.join(words) for words in commands if not _exists(words)] == []


def _exists(words: list[str]) -> bool:
    """Whether there is the target, module or file that a command starts."""
    match words:
        case ["terapipe", "--help" | "--version"]:
            return True
        case ["terapipe", name, *rest]:
            parts = {part.name for part in COMMANDS[name].parts} if name in COMMANDS else set()
            return name in COMMANDS and (not parts or not rest or rest[0] in parts)
        case ["make", target, *_]:
            return re.search(rf"^{target}:", MAKEFILE, re.MULTILINE) is not None
        case [*_, "-m" | "--module", module]:
            return find_spec(module) is not None
        case [_, *rest]:
            if "-m" in rest or "--module" in rest:
                flag = "-m" if "-m" in rest else "--module"
                return find_spec(rest[rest.index(flag) + 1]) is not None
            return "..." in rest or any((ROOT / word).is_file() for word in rest) or "plan/launch.sh" in rest
    return False
