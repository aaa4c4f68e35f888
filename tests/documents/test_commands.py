"""Every command and every file that a document shows works, in the order of the document, in a folder like a checkout.

A shell reads the commands as they are printed. Where a comment of the page says why commands are not run, programs of
ours read their flags and end. Trainings end after `--dry-run`, and searches try one number of token slices; `make
test-all` runs both as printed where two ranks are enough.
"""

import re
import shlex
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron_terapipe.checkpoint.conversion import export_checkpoint
from megatron_terapipe.command.main import COMMANDS
from tests import warm
from tests.architecture.sources import ROOT
from tests.data.trained_tokenizers import train_hugging_face
from tests.distributed import run_distributed
from tests.documents.blocks import Block, blocks_of, inline_commands, written
from tests.end_to_end.launching import MODEL, PIPELINE, TRAINING, train_on_this_rank
from tests.huggingface.models import MODELS as TINY
from tests.huggingface.models import save, whole_model

pytest.importorskip("safetensors")
pytest.importorskip("yaml")

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
BEGIN = r"(?:time |[A-Z_]+=\S+ )*"
OURS = re.compile(
    BEGIN
    + r"(?:terapipe |python (?:-m (?:benchmarks|deepspeed_ext|megatron_terapipe|tests)|examples)|deepspeed .*--module )"
)
"""Commands of which the flags are checked where they are not run."""
TRAINS = re.compile(BEGIN + r"(?:(?:deepspeed|torchrun) .*pretrain_gpt\.py|terapipe train |bash \S*launch\.sh)")
READS_A_RUN = re.compile(r"terapipe (?:generate|convert to-|report|plan --timeline)(?!.*--load qwen)")
OF_A_RUN = ("checkpoints", "metrics.jsonl", "measured", "runs/a", "runs/b")
"""What they read, by its names in the documents."""
TINY_RUN = shlex.join([*MODEL, *TRAINING[:8], "--mock-data", *PIPELINE])
"""Flags that `...` stands for."""
MINUTES = 10


def at_a_commit(line: str, not_run: str | None) -> str | None:
    """What is run in place of a command at each commit; None for nothing."""
    if line.startswith("make "):
        return f"make --dry-run --directory {ROOT} {line[5:]}"
    if TRAINS.match(line):
        line = line.replace(" ...", f" {TINY_RUN}")
        if "launch.sh" not in line and "terapipe train" not in line:
            line = re.sub(r"(.*?)pretrain_gpt\.py", lambda found: f"{_as_rank(found[1])} pretrain_gpt.py", line)
        return f"{line.partition(' #')[0]} --dry-run"
    if not_run:
        return f"{warm.ONLY_FLAGS}=1 {line}" if OURS.match(line) and re.search(" -m | --", line) else None
    if line.startswith("terapipe search rank") and "--num-token-slices" not in line:
        return f"{line.partition(' #')[0]} --num-token-slices 1"
    return line


def _as_rank(launcher: str) -> str:
    """The first rank of a launcher on this machine, which has one device."""
    if "deepspeed" not in launcher or "--hostfile" in launcher:
        return "python"
    stated = re.search(r"--num[-_]accelerators (\d+)", launcher)
    sizes = f"WORLD_SIZE={stated[1] if stated else 1} LOCAL_SIZE={stated[1] if stated else 1}"
    return f"RANK=0 LOCAL_RANK=0 {sizes} CROSS_RANK=0 CROSS_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python"


def in_all_tests(line: str, not_run: str | None) -> str | None:
    """What is run in place of a command by `make test-all`."""
    needs_more = TRAINS.match(line) and not re.search(r"--num[-_]accelerators 2\b", line)
    if not_run or needs_more or line.startswith("make "):
        return at_a_commit(line, not_run)
    return line.replace(" ...", f" {TINY_RUN}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkout, and the files that readers bring."""
    for name in ("benchmarks", "examples", "tests", "pretrain_gpt.py"):
        (tmp_path / name).symlink_to(ROOT / name)
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
    return tmp_path


def _write_qwen(folder: Path) -> None:
    """A tiny Qwen 2.5 under the name of a large one."""
    model = replace(TINY["llama"], num_layers=4, add_qkv_bias=True, vocab_size=1024, max_position_embeddings=32768)
    export_checkpoint(save(whole_model(model), model, folder / "ours"), folder / "qwen2.5-7b", family="qwen2")
    train_hugging_face(folder / "qwen2.5-7b")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of a run of six iterations, under the names that they have in the documents."""
    folder = tmp_path_factory.mktemp("trained")
    words = [*shlex.split(TINY_RUN), "--seq-length", "256", "--train-iters", "6", "--save", "checkpoints"]
    words += ["--metrics-file", "metrics.jsonl", "--timeline", "measured", "--lr", "1e-3"]
    assert run_distributed(train_on_this_rank, 2, words, folder) == [0, 0]
    for name in ("a", "b"):
        (folder / "runs" / name).mkdir(parents=True)
        shutil.copy(folder / "metrics.jsonl", folder / "runs" / name)
    return folder


WITH_COMMANDS = [path for path in written() if any(block.language != "python" for block in blocks_of(path))]
BY_NAME = {str(path.relative_to(ROOT)): path for path in WITH_COMMANDS}


def run_page(path: Path, folder: Path, trained: Path, *, whole: bool) -> None:
    """Write the files of a page and run its commands, in the order of the page."""
    blocks = [block for block in blocks_of(path) if block.language not in ("python", "diff", "text")]
    shells = [block for block in blocks if block.language == "shell"]
    for block in blocks:
        if block.language != "shell":
            assert block.file_name, f"{block.where}: say in the paragraph before it what the file is called"
            assert any(block.file_name in each.text for each in shells), f"{block.where}: show what reads the file"
            (folder / block.file_name).write_text(block.text)
    for block in shells:
        trains = any(map(TRAINS.match, block.commands()))
        for line in block.commands():
            not_run = None if trains and not TRAINS.match(line) else block.not_run
            if command := (in_all_tests if whole else at_a_commit)(line, not_run):
                output = _check(block, command, folder, trained)
                wrong = _predicted(block, whole=whole) - {*map(float, re.findall(r"([\d.]+) s\b", output))}
                assert not wrong, f"{block.where}: {command} does not print the times {sorted(wrong)} of its table"


def _predicted(block: Block, *, whole: bool) -> set[float]:
    """Seconds of the table "predicted" that follows a block; the best one, in bold, needs the whole search."""
    after = block.path.read_text(encoding="utf-8").partition(block.commands()[-1])[2]
    table = re.match(r"\n\n\| predicted .*?\n\n", after, re.DOTALL)
    times = re.findall(r"\| (\*\*)?([\d.]+) s\b", table[0]) if table else []
    return {float(time) for bold, time in times if whole or not bold}


def _check(block: Block, command: str, folder: Path, trained: Path) -> str:
    brought = []
    if READS_A_RUN.search(command):
        brought = [name for name in OF_A_RUN if not (folder / name).exists()]
        for name in brought:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).symlink_to(trained / name)
    done = warm.run(command, folder, timeout_s=60 * MINUTES)
    for name in brought:
        (folder / name).unlink()
    lines = (done.stderr or done.stdout).strip().splitlines()[-1:]
    assert done.returncode == 0, f"{block.where}: {command}: exit code {done.returncode}: {lines}"
    return done.stdout


@pytest.mark.parametrize("name", BY_NAME)
def test_commands_and_files(name: str, folder: Path, trained: Path) -> None:
    run_page(BY_NAME[name], folder, trained, whole=False)


@pytest.mark.thorough
@pytest.mark.parametrize("name", BY_NAME)
def test_commands_as_they_are_printed(name: str, folder: Path, trained: Path) -> None:
    run_page(BY_NAME[name], folder, trained, whole=True)


def test_an_indented_text_is_no_command() -> None:
    texts = [block for path in written() for block in blocks_of(path) if block.language == "text"]
    assert [block.where for block in texts if shutil.which(block.text.split()[0])] == []


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
