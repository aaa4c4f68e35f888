"""`terapipe train`: the launcher that it starts, and runs without one."""

import os
import sys
from pathlib import Path

import pytest

import pretrain_gpt
from deepspeed_ext.plan.errors import UserError
from megatron_terapipe.arguments.parser import MOST_USED, flags
from megatron_terapipe.command import train
from megatron_terapipe.command.main import main
from megatron_terapipe.command.train import (
    build_parser,
    dry_run_words,
    is_launched,
    launch_command,
    launch_variables,
    split,
    trainer_file,
    whole_parser,
)
from tests.architecture.sources import ROOT

FLAGS = ["--num-layers", "2", "--lr", "-1"]
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE")


@pytest.fixture
def hostfile(tmp_path: Path) -> str:
    path = tmp_path / "hostfile"
    path.write_text("a slots=4\nb slots=4\nc slots=2\n")
    return str(path)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PLACE:
        # Set first, so that values set by a test are taken back.
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)


def test_flags_of_the_launcher_may_be_anywhere_and_in_either_spelling() -> None:
    words = ["--num-layers", "2", "--num_gpus", "4", "--lr", "-1", "--launcher_args=--ntasks-per-node=8"]
    assert split(words) == ({"num_accelerators": "4", "launcher_args": "--ntasks-per-node=8"}, FLAGS)
    assert split(["--hostfile=h", *FLAGS, "--master-port", "1"]) == ({"hostfile": "h", "master_port": "1"}, FLAGS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hostfile"], "--hostfile has no value: write --hostfile=VALUE"),
        (["--num-nodes", "--lr"], "--num-nodes has no value: write --num-nodes=VALUE"),
        (
            ["--num-accelerators", "0"],
            "argument --num-accelerators/--num-gpus: 0 is not a whole number from 1 to 1,024: see ",
        ),
        (["--num-accelerators", "two"], "argument --num-accelerators/--num-gpus: two is not a whole number"),
        (
            ["--master-port", "99999999"],
            "argument --master-port: 99999999 is not a whole number from 1 to 65,535: see ",
        ),
        (["--launcher", "ssh"], "argument --launcher: invalid choice: 'ssh'"),
    ],
)
def test_flags_of_the_launcher_are_checked(words: list[str], message: str) -> None:
    with pytest.raises(UserError) as raised:
        split(words)
    assert str(raised.value).startswith(message)


BEGIN = [sys.executable, "-m", "megatron_terapipe.command.launcher_process"]
END = ["--log_level=error", "--no_local_rank", str(ROOT / "pretrain_gpt.py"), *FLAGS]


@pytest.mark.parametrize(
    ("words", "launcher"),
    [
        ([], []),
        (["--num-accelerators", "2"], ["--num_accelerators=2"]),
        (["--hostfile", "HOSTFILE"], ["--hostfile=HOSTFILE"]),
        (["--hostfile", "HOSTFILE", "--num-nodes", "2"], ["--hostfile=HOSTFILE", "--num_nodes=2"]),
        (["--hostfile", "HOSTFILE", "--include", "a@b:0,1"], ["--hostfile=HOSTFILE", "--include=a@b:0,1"]),
        (["--hostfile", "HOSTFILE", "--exclude", "c"], ["--hostfile=HOSTFILE", "--exclude=c"]),
        (
            ["--hostfile", "HOSTFILE", "--launcher", "slurm", "--launcher-args=--ntasks-per-node=4"],
            ["--hostfile=HOSTFILE", "--launcher=slurm", "--launcher_args=--ntasks-per-node=4"],
        ),
        (["--master-addr", "a", "--master-port", "29400"], ["--master_addr=a", "--master_port=29400"]),
    ],
)
def test_words_of_the_launcher(words: list[str], launcher: list[str], hostfile: str) -> None:
    words = [word.replace("HOSTFILE", hostfile) for word in words]
    launching, training = split([*words, *FLAGS])
    assert training == FLAGS
    assert launch_command(launching, training) == [
        *BEGIN,
        *(word.replace("HOSTFILE", hostfile) for word in launcher),
        *END,
    ]


def test_deepspeed_takes_every_flag_that_is_passed_on(monkeypatch: pytest.MonkeyPatch, hostfile: str) -> None:
    runner = pytest.importorskip("deepspeed.launcher.runner")
    words = f"--hostfile {hostfile} --num-gpus 2 --num-nodes 1 --include a --exclude b --launcher pdsh".split()
    words += ["--launcher-args=-x", "--master-addr", "a", "--master-port", "1"]
    command = launch_command(*split([*words, *FLAGS]))
    read = vars(runner.parse_args(command[len(BEGIN) :]))
    assert read["user_args"] == FLAGS
    expected = {"hostfile": hostfile, "num_gpus": 2, "num_nodes": 1, "include": "a", "exclude": "b", "launcher": "pdsh"}
    expected |= {"launcher_args": "-x", "master_addr": "a", "master_port": 1, "no_local_rank": True}
    assert {name: read[name] for name in expected} == expected


def test_runs_on_other_hosts_are_checked(hostfile: str) -> None:
    with pytest.raises(UserError, match="--hostfile nowhere cannot be read"):
        launch_command({"hostfile": "nowhere"}, FLAGS)
    with pytest.raises(UserError, match="shells of other hosts"):
        launch_command({"hostfile": hostfile}, ["--save", "a;b"])
    launch_command({}, ["--save", "a;b"])


def test_passwords_stay_here(hostfile: str) -> None:
    variables = {"PATH": "/bin", "MLFLOW_TRACKING_PASSWORD": "x"}
    assert launch_variables({}, variables) == variables
    sent = launch_variables({"hostfile": hostfile}, variables)
    assert sent["PATH"] == "/bin" and sent.keys() == {"PATH", "PDSH_SSH_ARGS_APPEND"}
    assert launch_variables({"hostfile": hostfile}, {"PDSH_SSH_ARGS_APPEND": ""}) == {"PDSH_SSH_ARGS_APPEND": ""}


# As a rank of another launcher


RANK = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}


def test_a_rank_trains_in_its_process() -> None:
    assert is_launched({}, RANK) and is_launched({}, OPEN_MPI)
    assert not is_launched({}, {})
    assert not is_launched({"hostfile": "h"}, {"SLURM_NTASKS": "8"}), "DeepSpeed's launcher in an allocation"
    with pytest.raises(UserError, match="write srun before the command"):
        is_launched({}, {"SLURM_NTASKS": "8"})
    with pytest.raises(UserError, match=r"--hostfile is for a launcher, .* torch started \(RANK is set\): drop"):
        is_launched({"hostfile": "h"}, RANK)
    with pytest.raises(UserError, match="mpirun started"):
        is_launched({"num_nodes": "1"}, OPEN_MPI)


@pytest.mark.parametrize("code", [0, 2, 130])
def test_its_exit_code_is_the_trainers(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(pretrain_gpt, "main", lambda words: seen.append(words) or code)
    for name, value in RANK.items():
        monkeypatch.setenv(name, value)
    assert main(["train", *FLAGS]) == code
    assert seen == [FLAGS]


def test_a_fault_of_a_run_has_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(words: list[str]) -> int:
        raise ConnectionResetError("gone")

    monkeypatch.setattr(pretrain_gpt, "main", fail)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert main(["train", *FLAGS]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_the_launcher_takes_the_place_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class Replaced(BaseException):
        pass

    def execve(path: str, words: list[str], variables: dict[str, str]) -> None:
        assert (path, words[-len(FLAGS) :]) == (sys.executable, FLAGS)
        raise Replaced

    monkeypatch.setattr(train.os, "execve", execve)
    with pytest.raises(Replaced):
        main(["train", "--num-accelerators", "2", *FLAGS])


# Dry runs


def test_ranks_of_a_dry_run(hostfile: str) -> None:
    dry = [*FLAGS, "--dry-run"]
    assert dry_run_words({}, dry) == (dry, {})
    assert dry_run_words({"hostfile": hostfile}, dry) == ([*dry, "--hostfile", hostfile], {})

    def ranks(flags: dict[str, str]) -> list[str]:
        words, variables = dry_run_words(flags, dry)
        assert words == dry
        return [variables[name] for name in PLACE]

    assert ranks({"num_accelerators": "4"}) == ["0", "4", "0", "4"]
    assert ranks({"hostfile": hostfile, "num_nodes": "2"}) == ["0", "8", "0", "4"]
    assert ranks({"hostfile": hostfile, "num_accelerators": "1"}) == ["0", "3", "0", "1"]
    with pytest.raises(UserError, match="--include a is not counted in a dry run"):
        ranks({"hostfile": hostfile, "include": "a"})


def test_a_dry_run_starts_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(train.os, "execve", None)
    words = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --vocab-size 512 --mock-data".split()
    words += "--micro-batch-size 1 --train-iters 1 --lr 0.1 --pipeline-model-parallel-size 2 --dry-run".split()
    assert main(["train", "--num-accelerators", "3", *words]) == 2
    assert "world size 3 is not a multiple" in capsys.readouterr().err
    assert not any(name in os.environ for name in PLACE)
    assert main(["train", "--num_accelerators=4", *words]) == 0
    assert "every check passed" in capsys.readouterr().out


# Flags


def test_a_misspelled_flag_is_reported_before_a_launcher_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--num-accelerators", "2", "--num-layrs", "2"]) == 2
    assert capsys.readouterr().err == "error: --num-layrs is not a flag: did you mean --num-layers?\n"
    assert main(["train"]) == 2
    assert capsys.readouterr().err == "error: no flags are given: see terapipe train --help\n"


def test_the_short_help_has_the_most_used_flags(capsys: pytest.CaptureFixture[str]) -> None:
    names = [name for group in MOST_USED.values() for name in group]
    assert len(names) == len(set(names)) and {*names} <= {each.name for each in flags()}
    short, whole = (build(prog="terapipe train").format_help() for build in (build_parser, whole_parser))
    assert all(f"  --{name.replace('_', '-')}" in short for name in names)
    assert all(f"--{each.name.replace('_', '-')}" in whole for each in flags())
    assert len(short.splitlines()) < 150 < 900 < len(whole.splitlines())
    assert "terapipe train --help all shows all: GROUP is one of model, parallel, " in " ".join(short.split())
    for words in (["--help-all"], ["--help", "all"], ["--hostfile", "h", "--help", "precision"]):
        assert main(["train", *words]) == 0
        text = capsys.readouterr().out
        assert text.startswith("Train a GPT") and "\n  --bf16" in text
        assert ("\n  --num-layers" in text) == ("precision" not in words)
    assert main(["train", "--help", "none"]) == 2


def test_the_trainer_is_the_one_of_this_project() -> None:
    assert Path(trainer_file()) == Path(pretrain_gpt.__file__).resolve()
