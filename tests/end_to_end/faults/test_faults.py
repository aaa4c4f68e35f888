"""Bad input ends in one line and exit code 2, before any rank waits for another and before anything is written.

Most cases call the command in this process, as rank 0 of the launch: it must not come as far as a process group. The
launcher's part is in `test_launched_faults`.
"""

import json
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from deepspeed.accelerator import get_accelerator

import pretrain_gpt
from tests.end_to_end.conftest import Trained
from tests.end_to_end.launching import PRETRAIN, environment, error_lines, flags


@dataclass(frozen=True)
class Outcome:
    code: int
    error: str


class Trainer:
    """Calls the command with outputs that must not appear."""

    def __init__(self, folder: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
        self.folder, self.data = folder, data
        self._monkeypatch, self._capfd = monkeypatch, capfd

    def __call__(self, *more: object, world_size: int = 2, data: Path | None = None) -> str:
        """The one line after `error: `."""
        for name, value in {"RANK": 0, "LOCAL_RANK": 0, "LOCAL_SIZE": world_size, "WORLD_SIZE": world_size}.items():
            self._monkeypatch.setenv(name, str(value))
        outputs = ["--save", self.folder / "save", "--metrics-file", self.folder / "metrics" / "m.jsonl"]
        code = pretrain_gpt.main(flags(data or self.data, *outputs, "--timeline", self.folder / "timeline", *more))
        captured = self._capfd.readouterr()
        assert code == 2
        assert captured.out == ""
        (line,) = captured.err.splitlines()
        assert line.startswith("error: ")
        assert not torch.distributed.is_initialized()
        assert not any((self.folder / name).exists() for name in ("save", "metrics", "timeline"))
        return line.removeprefix("error: ").replace(str(self.folder), "FOLDER")


@pytest.fixture
def refused(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Trainer:
    # In a process DeepSpeed says once that it found no GPU; the lines of a test are those after that.
    get_accelerator()
    capfd.readouterr()
    return Trainer(tmp_path, data, monkeypatch, capfd)


FLAGS = {
    "token_slices_that_do_not_cover_the_sequence": (
        "--token-slices 9,9,9,9",
        "--token-slices: token slices 9,9,9,9 sum to 36, but the sequence has 32 tokens: change one of them by -4",
    ),
    "stages_that_do_not_divide_the_ranks": ("--pipeline-model-parallel-size 3", None),
    "an_unknown_flag": ("--num-token-slice 4", "--num-token-slice is not a flag: did you mean --num-token-slices?"),
    "a_flag_of_another_trainer": (
        "--remote-device cpu",
        "--remote-device cpu: weights stay on the accelerator: use none",
    ),
    "a_vocabulary_without_room": (
        "--vocab-size 100",
        "--vocab-size 100 has no room for the 257 tokens of byte: raise it, or leave it out",
    ),
    "a_split_that_leaves_nothing_to_validate_on": ("--split 1,1e-9", "--split 1,1e-9 leaves no document of the 200 in"),
    "a_network_of_gpus_without_one": (
        "--distributed-backend nccl",
        "--distributed-backend nccl needs GPUs, and there are none: use gloo, or drop it",
    ),
}


@pytest.mark.parametrize(("words", "said"), FLAGS.values(), ids=FLAGS)
def test_flags_that_cannot_be_trained(refused: Trainer, words: str, said: str | None) -> None:
    line = refused(*words.split())
    if said is None:
        assert "world size 2" in line
        assert "3" in line
    else:
        assert said in line


SCHEDULE_FILES = {
    "of_another_pipeline": (
        "0F0.0 0B0.0\n1F0.0 1B0.0",
        r"--pipeline-schedule .*: the schedule of .* is for .*, and the run",
    ),
    "that_deadlocks": (
        "0F0.0 0F0.1 0B0.0 0B0.1\n1F0.0 1F0.1 1B0.1 1B0.0",
        r"schedule.csv: the schedule deadlocks: rank 0 at 0B0.0 waits for .*; reorder these ops",
    ),
    "with_an_op_missing": ("0F0.0 0F0.1 0B0.1\n1F0.0 1F0.1 1B0.1 1B0.0", r"schedule.csv: .*0.*0\.0"),
    "that_is_something_else": ('{"a": 1}', r"schedule.csv: line 1: op .* is not written as stage, "),
}


@pytest.mark.parametrize(("text", "said"), SCHEDULE_FILES.values(), ids=SCHEDULE_FILES)
def test_schedule_files_that_cannot_be_run(refused: Trainer, tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text(text)
    line = refused("--pipeline-schedule", path, "--num-token-slices", 2, "--global-batch-size", 2)
    assert re.search(said, line), line


def test_a_batch_that_the_replicas_cannot_share(refused: Trainer) -> None:
    line = refused("--global-batch-size", 6, world_size=8)
    assert line.startswith("--global-batch-size 6 is not a multiple of --micro-batch-size 2 x data-parallel size 4 = 8")


def test_data_that_is_not_there(refused: Trainer) -> None:
    line = refused(data=refused.folder / "absent")
    assert line.startswith("no indexed dataset at FOLDER/absent: FOLDER/absent.bin and FOLDER/absent.idx not found")
    assert line.endswith("--data-path takes the path without .bin and .idx, for example corpus_text_document")


@pytest.mark.parametrize("suffix", ["bin", "idx"])
@pytest.mark.parametrize("keep", [0, 20, -2], ids=["emptied", "cut_short", "two_bytes_short"])
def test_data_that_is_truncated(refused: Trainer, suffix: str, keep: int) -> None:
    for name in ("bin", "idx"):
        shutil.copy(f"{refused.data}.{name}", refused.folder / f"copy.{name}")
    path = refused.folder / f"copy.{suffix}"
    path.write_bytes(path.read_bytes()[:keep])
    line = refused(data=refused.folder / "copy")
    assert line.startswith(f"FOLDER/copy.{suffix} is ")
    assert line.endswith("write the dataset again with megatron_terapipe.data.preprocess")


def test_text_that_is_too_short(refused: Trainer) -> None:
    line = refused("--seq-length", 60000)
    assert "one sample takes seq_length + 1 = 60001: shorten --seq-length" in line


CHECKPOINTS = {
    "hidden_size": (
        "--hidden-size 64",
        "the checkpoint has --hidden-size 32, this run 64: set --hidden-size 32, or load another checkpoint",
    ),
    "optimizer": ("--optimizer sgd", "the state of --optimizer adam, this run uses sgd: set --optimizer adam, or load"),
    "tag": ("--load-tag global_step4", "there is no checkpoint global_step4 in"),
    "layers": ("--num-layers 5 --finetune", "the checkpoint has --num-layers 4, this run 5: set --num-layers 4"),
}


@pytest.mark.parametrize(("words", "said"), CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_a_checkpoint_of_another_run(refused: Trainer, trained: Trained, words: str, said: str) -> None:
    assert said in refused("--load", trained.checkpoints, *words.split())


def test_a_checkpoint_that_is_not_there(refused: Trainer) -> None:
    line = refused("--load", refused.folder / "absent", "--exit-on-missing-checkpoint")
    assert line == "--load FOLDER/absent holds no checkpoint: give a directory that a run saved to"


def test_a_checkpoint_with_a_file_missing(refused: Trainer, trained: Trained) -> None:
    shutil.copytree(trained.checkpoints, refused.folder / "copy")
    next((refused.folder / "copy" / "global_step6").glob("zero_pp_rank_0_mp_rank_01*")).unlink()
    line = refused("--load", refused.folder / "copy")
    assert "lacks zero_pp_rank_0_mp_rank_01_optim_states.pt: put the file back" in line


@pytest.mark.parametrize("flag", ["--save", "--metrics-file", "--timeline"])
def test_an_output_that_cannot_be_written(refused: Trainer, flag: str) -> None:
    """Found now, and not when the first checkpoint is due."""
    (refused.folder / "file").write_text("")
    line = refused(flag, refused.folder / "file" / "below")
    assert line == f"{flag} FOLDER/file/below cannot be written, because FOLDER/file is not a directory: name another"


def test_a_deepspeed_config_that_contradicts_a_flag(refused: Trainer) -> None:
    path = refused.folder / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 64}))
    line = refused("--deepspeed-config", path)
    assert "sets train_batch_size to 64, but --global-batch-size makes it 8: change the flag, or remove it" in line


def run_pretrain(data: Path, *more: object, **variables: str) -> subprocess.CompletedProcess[str]:
    launched = {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_SIZE": "2", "WORLD_SIZE": "2"}
    command = [sys.executable, str(PRETRAIN), *flags(data, *more)]
    return subprocess.run(
        command, env=environment(**launched | variables), capture_output=True, text=True, timeout=120, check=False
    )


def test_another_deepspeed_is_named(data: Path, tmp_path: Path) -> None:
    """An installation says its version in its metadata; the one found first on the path counts."""
    metadata = tmp_path / "deepspeed-0.15.4.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.15.4\n")
    variables = environment()
    paths = f"{tmp_path}:{variables['PYTHONPATH']}"
    found = run_pretrain(data, "--save", tmp_path / "save", PYTHONPATH=paths)
    assert found.returncode == 2, found.stderr
    (line,) = error_lines(found.stderr)
    assert line.startswith("error: deepspeed 0.15.4 is installed, and the token-slice engine needs ")
    assert "pip install 'deepspeed" in line
    assert not (tmp_path / "save").exists()


def test_bad_flags_are_refused_before_torch_is_imported(data: Path) -> None:
    """So every rank ends within a second."""
    program = "import sys, pretrain_gpt; code = pretrain_gpt.main(); print('torch' in sys.modules); sys.exit(code)"
    command = [sys.executable, "-c", program, *flags(data, "--token-slices", "9,9")]
    found = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert (found.returncode, found.stdout) == (2, "False\n")
    assert len(error_lines(found.stderr)) == 1


def test_half_an_environment(data: Path) -> None:
    command = [sys.executable, str(PRETRAIN), *flags(data)]
    variables = environment(RANK="0")
    found = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)
    said = "error: WORLD_SIZE is not set, but RANK is: start with deepspeed, torchrun, mpirun or srun\n"
    assert (found.returncode, found.stdout, found.stderr) == (2, "", said)


def test_ranks_that_cannot_meet(data: Path, tmp_path: Path) -> None:
    found = run_pretrain(data, "--save", tmp_path / "save")
    assert found.returncode == 2, found.stderr
    (line,) = error_lines(found.stderr)
    assert line.startswith("error: MASTER_ADDR and MASTER_PORT not set, so the 2 ranks cannot meet: ")
    assert not (tmp_path / "save").exists()


def test_only_one_rank_of_a_host_says_what_all_find(data: Path) -> None:
    found = run_pretrain(data, "--token-slices", "9,9", RANK="1", LOCAL_RANK="1")
    assert (found.returncode, found.stdout, found.stderr) == (2, "", "")


def test_a_port_that_another_run_holds(data: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        variables = environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        command = [
            sys.executable,
            str(PRETRAIN),
            *flags(data, "--save", tmp_path / "save", "--pipeline-model-parallel-size", 1),
        ]
        found = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 2, found.stderr
    (line,) = error_lines(found.stderr)
    assert line.startswith(f"error: port {port} of 127.0.0.1, where the ranks meet, is in use")
    assert "Traceback" not in found.stderr
    assert not (tmp_path / "save").exists()
