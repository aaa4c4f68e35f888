"""Bad input ends in one line and exit code 2, before ranks wait for each other and before any output is written.

The command runs in this process, as rank 0 of a launch: it must not reach a process group. The launcher's part is in
`test_launched_faults`.
"""

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deepspeed.accelerator import get_accelerator

import pretrain_gpt
from megatron_terapipe.checkpoint.directories import only_run_in
from tests import warm
from tests.end_to_end.conftest import Trained
from tests.end_to_end.launching import PRETRAIN, environment, error_lines, flags


class Trainer:
    """Calls the command with outputs that must not appear."""

    def __init__(self, folder: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
        self.folder, self.data = folder, data
        self._monkeypatch, self._capfd = monkeypatch, capfd

    def __call__(self, *more: object, data: Path | None = None, **variables: object) -> str:
        """Return the one line after `error: `."""
        launch = {"RANK": 0, "LOCAL_RANK": 0, "LOCAL_SIZE": 2, "WORLD_SIZE": 2} | variables
        for name, value in launch.items():
            if value is None:
                self._monkeypatch.delenv(name, raising=False)
            else:
                self._monkeypatch.setenv(name, str(value))
        outputs = ["--save", self.folder / "save", "--metrics-file", self.folder / "metrics" / "m.jsonl"]
        code = pretrain_gpt.main(flags(data or self.data, *outputs, "--timeline", self.folder / "timeline", *more))
        captured = self._capfd.readouterr()
        assert (code, captured.out) == (2, "")
        assert not torch.distributed.is_initialized()
        assert not any((self.folder / name).exists() for name in ("save", "metrics", "timeline"))
        if launch["RANK"]:
            return str(captured.err)
        (line,) = captured.err.splitlines()
        assert line.startswith("error: ")
        return str(line.removeprefix("error: ").replace(str(self.folder), "FOLDER"))


@pytest.fixture
def refused(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Trainer:
    (tmp_path / "file").touch()
    (tmp_path / "ds.json").write_text('{"train_batch_size": 64}')
    # DeepSpeed prints once in a process that it found no GPU.
    get_accelerator()
    capfd.readouterr()
    return Trainer(tmp_path, data, monkeypatch, capfd)


FLAGS = {
    "token_slices": ("--token-slices 9,9,9,9", ("--token-slices", "9,9,9,9", "36", "32", "-4")),
    "stages": ("--pipeline-model-parallel-size 3", ("world size 2", "3")),
    "unknown_flag": ("--num-token-slice 4", ("--num-token-slice is", "--num-token-slices")),
    "flag_of_another_trainer": ("--remote-device cpu", ("--remote-device cpu", "none")),
    "small_vocabulary": ("--vocab-size 100", ("--vocab-size 100", "257", "byte")),
    "split_without_validation": ("--split 1,1e-9", ("--split 1,1e-9", "200")),
    "nccl_without_gpus": ("--distributed-backend nccl", ("--distributed-backend nccl", "gloo")),
    "short_text": ("--seq-length 60000", ("60001", "--seq-length")),
    "missing_checkpoint": ("--load FOLDER/absent --exit-on-missing-checkpoint", ("--load FOLDER/absent",)),
    "batch_and_replicas": (
        "--global-batch-size 6 WORLD_SIZE=8",
        ("--global-batch-size 6", "--micro-batch-size 2", "8"),
    ),
    **{
        f"{flag}_below_a_file": (
            f"--{flag} FOLDER/file/below",
            (f"--{flag} FOLDER/file/below ", "FOLDER/file is not a directory: "),
        )
        for flag in ("save", "metrics-file", "timeline")
    },
    "metrics_file_is_a_folder": (
        "--metrics-file /",
        ("--metrics-file / cannot be written, because it is a directory: give another",),
    ),
    "metrics_file_of_the_system": (
        "--metrics-file /proc/version",
        ("--metrics-file /proc/version cannot be written, because /proc/version is not writable: give another",),
    ),
    "deepspeed_config": ("--deepspeed-config FOLDER/ds.json", ("train_batch_size", "64", "--global-batch-size")),
    "half_an_environment": ("WORLD_SIZE=", ("WORLD_SIZE", "RANK", "torchrun")),
}


@pytest.mark.parametrize(("words", "parts"), FLAGS.values(), ids=FLAGS)
def test_bad_flags(refused: Trainer, words: str, parts: tuple[str, ...]) -> None:
    given = [word.replace("FOLDER", str(refused.folder)) for word in words.split()]
    variables = dict(word.split("=") for word in given if "=" in word)
    variables |= {"LOCAL_SIZE": variables["WORLD_SIZE"]} if "WORLD_SIZE" in variables else {}
    line = refused(
        *(word for word in given if "=" not in word), **{name: value or None for name, value in variables.items()}
    )
    assert all(part in line for part in parts), line


SCHEDULE_FILES = {
    "of_another_pipeline": "0F0.0 0B0.0\n1F0.0 1B0.0",
    "that_deadlocks": "0F0.0 0F0.1 0B0.0 0B0.1\n1F0.0 1F0.1 1B0.1 1B0.0",
    "with_an_op_missing": "0F0.0 0F0.1 0B0.1\n1F0.0 1F0.1 1B0.1 1B0.0",
    "of_another_format": '{"a": 1}',
}


@pytest.mark.parametrize("text", SCHEDULE_FILES.values(), ids=SCHEDULE_FILES)
def test_bad_schedule_files(refused: Trainer, tmp_path: Path, text: str) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text(text)
    line = refused("--pipeline-schedule", path, "--num-token-slices", 2, "--global-batch-size", 2)
    assert "schedule.csv: " in line
    assert ("deadlock" in line) == (text == SCHEDULE_FILES["that_deadlocks"])


def test_bad_data(refused: Trainer) -> None:
    line = refused(data=refused.folder / "absent")
    assert "FOLDER/absent.bin" in line and "--data-path" in line
    for suffix in ("bin", "idx"):
        for name in ("bin", "idx"):
            shutil.copy(f"{refused.data}.{name}", refused.folder / f"copy.{name}")
        path = refused.folder / f"copy.{suffix}"
        path.write_bytes(path.read_bytes()[:-2])
        assert refused(data=refused.folder / "copy").startswith(f"FOLDER/copy.{suffix} is ")


def test_a_checkpoint_of_another_run(refused: Trainer, trained: Trained) -> None:
    line = refused("--load", trained.checkpoints, "--hidden-size", 64)
    assert "--hidden-size 32" in line and "64" in line
    assert "global_step4" in refused("--load", trained.checkpoints, "--load-tag", "global_step4")


def test_the_checkpoints_of_a_run_that_goes_on(refused: Trainer) -> None:
    with only_run_in(refused.folder / "shared"):
        line = refused("--save", refused.folder / "shared")
    assert line.startswith(f"--save FOLDER/shared is in use by another run (host {socket.gethostname()}, process ")


def test_one_rank_of_a_host_prints_the_error(refused: Trainer) -> None:
    assert refused("--token-slices", "9,9", RANK=1, LOCAL_RANK=1) == ""


def test_bad_flags_are_refused_before_torch_is_imported(data: Path) -> None:
    """So every rank ends within a second."""
    program = "import sys, pretrain_gpt; code = pretrain_gpt.main(); print('torch' in sys.modules); sys.exit(code)"
    words = [sys.executable, "-c", program, *flags(data, "--token-slices", "9,9")]
    found = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert (found.returncode, found.stdout) == (2, "False\n")
    assert len(error_lines(found.stderr)) == 1


def test_a_rendezvous_that_fails(data: Path, tmp_path: Path) -> None:
    """Without an address, and on the port of another run."""
    words = flags(data, "--save", tmp_path / "save", "--pipeline-model-parallel-size", 1)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        for variables, parts in (
            ({"RANK": "0", "LOCAL_RANK": "0", "LOCAL_SIZE": "2", "WORLD_SIZE": "2"}, ("MASTER_ADDR", "MASTER_PORT")),
            ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}, (f"port {port} of 127.0.0.1", "--master_port")),
        ):
            found = warm.run(["python", str(PRETRAIN), *words], tmp_path, **variables)
            assert found.returncode == 2, found.stderr
            (line,) = error_lines(found.stderr)
            assert all(part in line for part in parts), line
            assert "Traceback" not in found.stderr
            assert not (tmp_path / "save").exists()
