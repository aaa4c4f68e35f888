"""`--dry-run`: all checks of a run for all its ranks, in one process."""

import json
import shutil
from pathlib import Path

import pytest

from megatron_terapipe.strategy import Strategy
from pretrain_gpt import main
from tests.end_to_end.launching import MODEL, PIPELINE, TRAINING, flags

NO_DROPOUT = ["--hidden-dropout", "0", "--attention-dropout", "0"]
CHECK = [*MODEL, *TRAINING[:8], *NO_DROPOUT, "--mock-data", "--dry-run"]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_the_rows_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CHECK, *PIPELINE, "--data-parallel-size", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "dry run: every check passed, and nothing was started"
    assert [line.split(maxsplit=1)[0] for line in lines[1:]] == [
        *("model", "ranks", "stages", "token", "schedule", "batch", "precision", "start", "not")
    ]
    assert lines[1].endswith(" parameters in 4 transformer layers of width 32")
    assert "4 = 2 data x 1 tensor x 2 pipeline parallel" in lines[2]
    assert "2: transformer layers 0-1, 2-3" in lines[3]
    assert "4 of 8, 8, 8, 8 tokens" in lines[4]
    assert "1f1b, 2 micro-batches of 2 sequences on each replica" in lines[5]
    assert "8 sequences of 32 tokens, 6 iterations" in lines[6]
    assert lines[8].split() == ["start", "new", "weights"]
    assert lines[9].split(maxsplit=3) == ["not", "checked", "here", "devices, hosts"]


def test_other_devices_and_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("alpha slots=4\nbeta slots=4 # the new one\n")
    cluster = "--distributed-backend nccl --fp16 --zero-stage 1 --tensor-model-parallel-size 2 --hostfile".split()
    assert main([*CHECK, *PIPELINE, *cluster, str(hostfile)]) == 0
    out = capsys.readouterr().out
    assert "8 = 2 data x 2 tensor x 2 pipeline parallel" in out
    assert "fp16, ZeRO 1" in out


def test_without_the_files_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    there = "--data-path 0.3 far/corpus 0.7 far/books --vocab-file far/vocab.json --merge-file far/merges.txt"
    there += " --tokenizer-type GPT2BPETokenizer --save /proc/saved --load /proc/saved --split 100,0,0"
    there += " --profile --profile-step-start 1 --profile-step-end 3 --use-pytorch-profiler --tensorboard-dir /proc/x"
    words = [*MODEL, *TRAINING[:8], *there.split()]
    assert main([*words, "--dry-run"]) == 2
    assert "far/vocab.json cannot be read" in capsys.readouterr().err
    assert main([*words, "--dry-run-without-files"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split("  ")[-1] == (
        "devices, hosts, tokenizer far/vocab.json far/merges.txt (assumed to have 50257 tokens), "
        "data far/corpus far/books, checkpoints /proc/saved, outputs /proc/saved /proc/x"
    )
    assert main([*words, "--dry-run-without-files", "--global-batch-size", "9"]) == 2
    assert "--global-batch-size 9 is not a multiple" in capsys.readouterr().err


def test_a_strategy_gives_the_number_of_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "strategy.json"
    strategy = Strategy(data_parallel_size=3, tensor_parallel_size=4, micro_batch_size=2, global_batch_size=12)
    path.write_text(json.dumps(strategy.to_json()))
    assert main([*MODEL, "--train-iters", "1", "--lr", "1", "--mock-data", "--dry-run", "--strategy", str(path)]) == 0
    assert "12 = 3 data x 4 tensor x 1 pipeline parallel" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--data-parallel-size 3", "--global-batch-size 8 "),
        ("--save /proc/nothing", "--save /proc/nothing "),
        ("--deepspeed-config nowhere.json", "--deepspeed-config"),
        ("--token-slices auto --cluster nowhere.json", "--cluster nowhere.json "),
        ("--pipeline-schedule optimised --op-profile nowhere.json", "--op-profile: nowhere.json "),
        ("--hostfile nowhere", "--hostfile nowhere cannot be read (No such file or directory): "),
        ("--hostfile {bad}", '--hostfile: {bad}: line 1 of the hostfile, "alpha", is not HOST slots=N '),
        ("--hostfile {good} --data-parallel-size 2", "--data-parallel-size 2 contradicts the 4 processes launched"),
    ],
)
def test_refused_runs(words: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad, good = (tmp_path / name for name in ("bad", "good"))
    bad.write_text("alpha\n")
    good.write_text("alpha slots=4\n")
    assert main([*CHECK, *words.format(bad=bad, good=good).split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {line.format(bad=bad)}")
    assert error.count("\n") == 1


def test_data_is_checked(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags(data, "--dry-run", "--verify-data")) == 0
    capsys.readouterr()
    copy = tmp_path / data.name
    for each in data.parent.glob(f"{data.name}.*"):
        shutil.copy(each, tmp_path)
    content = bytearray(copy.with_name(f"{data.name}.bin").read_bytes())
    content[len(content) // 2] ^= 1
    copy.with_name(f"{data.name}.bin").write_bytes(content)
    assert main(flags(copy, "--dry-run", "--verify-data")) == 2
    assert f"error: {copy}.bin is damaged: its SHA-256" in capsys.readouterr().err
    assert main(flags(data.with_name("other"), "--dry-run")) == 2
    assert "other" in capsys.readouterr().err


def test_one_rank_of_a_launch_prints(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, prints in ((0, True), (3, False)):
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 4, "LOCAL_SIZE": 4}.items():
            monkeypatch.setenv(name, str(value))
        assert main([*CHECK, *PIPELINE]) == 0
        assert ("4 = 2 data x 1 tensor x 2 pipeline" in capsys.readouterr().out) == prints


def test_the_machine_of_a_search(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--pipeline-model-parallel-size", "2", "--token-slices", "auto", "--num-token-slices", "2"]
    assert main([*CHECK, *words, "--pipeline-schedule", "optimised"]) == 0
    for line in capsys.readouterr().out.splitlines()[4:6]:
        assert line.endswith(", found for nodes of 8 A100-SXM4-80GB, since no --cluster is given")
