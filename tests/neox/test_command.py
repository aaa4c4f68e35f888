"""The command `neox`: it reads files, and prints a command for a shell, and comments."""

import json
import subprocess
from pathlib import Path

import pytest

from megatron_terapipe.neox.__main__ import main

pytest.importorskip("yaml")

MODEL = """
# In the manner of NeoX: JSON with comments, and commas where JSON has none.
{
  "num-layers": 4,
  "hidden_size": 64,
  "num_attention_heads": 4,
  "seq_length": 128,
  "max-position-embeddings": 128,
  "gpt_j_residual": False,
  "optimizer": {"type": "Adam", "params": {"lr": 6e-4,}},
}
"""
REST = """
train_micro_batch_size_per_gpu: 2
train_iters: 100
data-path: my corpus
vocab-file: vocab.json
merge-file: merges.txt
log-dir: logs
"""


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    (tmp_path / "model.yml").write_text(MODEL)
    (tmp_path / "rest.yml").write_text(REST)
    return [str(tmp_path / "model.yml"), str(tmp_path / "rest.yml")]


def failing(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return line


def test_the_command_runs_in_a_shell(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(files) == 0
    out, err = capsys.readouterr()
    # This `terapipe` prints its words.
    script = f'terapipe() {{ printf "%s\\n" "$@"; }}\n{out}'
    words = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    assert words[0] == "train"
    assert words[words.index("--data-path") + 1] == "my corpus"
    assert words[words.index("--lr") + 1] == "0.0006"
    comments = [line.removeprefix("# ") for line in out.splitlines() if line.startswith("# ")]
    assert comments == err.splitlines()
    assert "log_dir: the log and --metrics-file have all figures" in comments


def test_a_value_with_a_line_break_runs_nothing(files: list[str], tmp_path: Path) -> None:
    """The trainer's error repeats a value, and is a comment of the script."""
    hit = tmp_path / "hit"
    (tmp_path / "more.yml").write_text("split: " + json.dumps(f"x\ntouch${{IFS}}{hit}\n"))
    assert main([*files, str(tmp_path / "more.yml"), "--output", str(tmp_path / "train.sh")]) == 0
    script = (tmp_path / "train.sh").read_text()
    assert "is not three shares" in script
    subprocess.run(["bash", "-c", f"terapipe() {{ :; }}\n{script}"], check=True)
    assert not hit.exists()


def test_output_file(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*files, "--output", str(tmp_path / "train.sh")]) == 0
    assert not capsys.readouterr().out
    assert "--num-layers 4 \\\n" in (tmp_path / "train.sh").read_text()
    again = tmp_path / "again.yml"
    again.write_text("num_layers: 4\n")
    assert f"error: {again} sets num_layers, and so does {files[0]}: remove it" in failing([*files, str(again)], capsys)
    line = failing([*files, "--output", str(tmp_path / "none" / "train.sh")], capsys)
    assert "train.sh cannot be written (No such file or directory): name another file" in line


def test_the_trainers_error_is_a_comment(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "more.yml").write_text("finetune: true\n")
    for words, said in (
        (files[:1], "--micro-batch-size must be given: add it"),
        ([*files, str(tmp_path / "more.yml")], "--finetune has no effect without --load"),
    ):
        assert main(words) == 0
        assert f"the trainer does not take this as it is: {said}" in capsys.readouterr().err


def test_a_refusal_ends_the_command(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text('{"pos_emb": "alibi", "train_epochs": 2}')
    line = failing([*files, str(tmp_path / "other.json"), "--output", str(tmp_path / "train.sh")], capsys)
    assert 'sets pos_emb to "alibi", and' in line and "sets train_epochs to 2, and" in line
    assert not (tmp_path / "train.sh").exists()


def test_files_are_named_as_for_neoxs_launcher(files: list[str], tmp_path: Path) -> None:
    for words in (
        ["./deepy.py", "train.py", "-d", str(tmp_path), "model.yml", "rest.yml", "--wandb_group", "tests"],
        ["train.py", "-d", str(tmp_path), "model.yml", "rest.yml"],
        ["./train.py", "--conf_dir", str(tmp_path), "model", "rest"],
        ["-d", str(tmp_path), "model", "rest.yml"],
        [str(tmp_path / "model"), *files[1:]],
    ):
        assert main([*words, "--output", str(tmp_path / "train.sh")]) == 0
        assert "--data-path 'my corpus'" in (tmp_path / "train.sh").read_text()


@pytest.mark.parametrize(
    ("more", "batch"),
    [("", 16), ("num_nodes: 1\n", 8), ("num_gpus: 2\n", 8), ("num_nodes: 1\nnum_gpus: 3\n", 6), ("exclude: b\n", None)],
)
def test_the_number_of_processes_follows_from_the_hostfile(
    files: list[str], more: str, batch: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hosts").write_text("a slots=4\nb slots=4\n")
    (tmp_path / "there.yml").write_text(f"hostfile: {tmp_path / 'hosts'}\n{more}")
    assert main([*files, str(tmp_path / "there.yml")]) == 0
    out = capsys.readouterr().out
    assert f"--global-batch-size {batch} " in out if batch else "--global-batch-size" not in out


def test_flags_of_the_launcher_win_over_the_files(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*files, "--wandb_project", "mine"]) == 0
    assert "--wandb-project" not in capsys.readouterr().out
    (Path(files[1])).write_text(REST + "use_wandb: true\nwandb_project: theirs\n")
    assert main([*files, "--wandb_project", "mine"]) == 0
    assert "--wandb-project mine" in capsys.readouterr().out


def test_older_files_have_older_defaults(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for more, dropout, decay in ((["--defaults-before-2023-12"], 0.1, 0.01), ([], 0.0, 0.1)):
        assert main([*files, *more]) == 0
        out = capsys.readouterr().out
        assert f"--hidden-dropout {dropout}" in out and f"--weight-decay {decay}" in out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        # The words, or the text of the file {}, and the line.
        ("num_layers: 3\nnum-layers: 4\n", "{} sets num_layers twice: remove one"),
        ("num_layers: 3\nnum_layers: 3\n", "{} is not YAML (key 'num_layers' appears twice in line 1)"),
        ("optimizer: {params: {lr: 1, lr: 2}}\n", "{} is not YAML (key 'lr' appears twice in line 1)"),
        ("num_layers: [1\n", "{} is not YAML ("),
        ("- 1\n", "{} is not a mapping of settings to values: write one"),
        ("", "{} is not a mapping of settings to values: write one"),
        (["generate.py", "a.yml"], "generate.py does not train: name train.py"),
        (["deepy.py"], "train.py has no configuration: name files"),
        (["train.py"], "train.py has no configuration: name files"),
        (["-d", "there", "125M"], "there/125M.yml cannot be read (No such file or directory): give a file"),
        (["{}", "--world-size", "0"], "--world-size 0 is not positive: give 1 or more"),
        (["{}", "{}"], "{} sets num_layers twice: remove one"),
    ],
)
def test_errors(words: str | list[str], line: str, files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if isinstance(words, str):
        Path(files[0]).write_text(words)
        words = ["{}"]
    assert failing([each.replace("{}", files[0]) for each in words], capsys).startswith(
        "error: " + line.replace("{}", files[0])
    )
