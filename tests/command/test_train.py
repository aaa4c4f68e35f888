"""`terapipe train`: the launcher that it starts, and runs without one."""

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

import pretrain_gpt
from deepspeed_ext.plan.errors import UserError
from megatron_terapipe.arguments.parser import MOST_USED, flags
from megatron_terapipe.command import train
from megatron_terapipe.command.hosts import check_environment_file, check_reachable, devices_elsewhere, hosts_of
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
OWN = ["mine.py", "--size", "1", *FLAGS]
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE")


def launched(flags: dict[str, str], words: list[str], variables: dict[str, str] | None = None) -> list[str]:
    return launch_command(flags, words, hosts_of(flags), os.environ if variables is None else variables)


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
    monkeypatch.setattr("megatron_terapipe.launch.launcher.free_port", lambda: 20000)


def test_flags_of_the_launcher_may_be_anywhere_and_in_either_spelling() -> None:
    words = ["--num-layers", "2", "--num_gpus", "4", "--lr", "-1", "--launcher_args=--ntasks-per-node=8"]
    assert split(words) == ({"num_accelerators": "4", "launcher_args": "--ntasks-per-node=8"}, FLAGS)
    assert split(["--hostfile=h", *FLAGS, "--master-port", "1"]) == ({"hostfile": "h", "master_port": "1"}, FLAGS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hostfile"], "argument --hostfile: expected one argument: see "),
        (["--num-nodes", "--lr"], "argument --num-nodes: expected one argument: see "),
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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--include a --exclude b", "--include a and --exclude b do not go together"),
        ("--include a --num-accelerators 1", "--include a and --num-accelerators 1 do not go together"),
        ("--include d:0", "--include d:0: 'd' is not a host of HOSTFILE: the hosts are a, b, c"),
        ("--include c:0,2", "--include c:0,2: host c has no slot 2: its 2 slots are numbered from 0"),
        ("--exclude a@b@c", "--exclude a@b@c leaves no device"),
        ("--include a:x", "--include a:x: 'a:x' is not HOST or HOST:0,2, with @ between them"),
        ("--include fe80::1%eth0", "--include fe80::1%eth0: 'fe80::1%eth0' is not HOST or HOST:0,2"),
        ("--include root@a:0", "--include root@a:0: 'root' is not a host of HOSTFILE"),
        ("--num-nodes 4", "--num-nodes 4, but the hostfile names 3: give at most 3"),
        ("--num-accelerators 3", "--num-accelerators 3, but the hostfile has slots=2 for host c"),
    ],
)
def test_hosts_and_devices_are_checked(words: str, message: str, hostfile: str) -> None:
    with pytest.raises(UserError) as raised:
        hosts_of(split(["--hostfile", hostfile, *words.split()])[0])
    assert str(raised.value).startswith(message.replace("HOSTFILE", hostfile))


@pytest.mark.parametrize(
    ("words", "devices"),
    [
        ("", {"a": 4, "b": 4, "c": 2}),
        ("--num-nodes 2 --num-accelerators 3", {"a": 3, "b": 3}),
        ("--include c@a:3,1", {"a": [1, 3], "c": 2}),
        ("--exclude b@c:0", {"a": 4, "c": [1]}),
        ("--exclude c:0,1", {"a": 4, "b": 4}),
    ],
)
def test_devices_of_hosts(words: str, devices: dict[str, int | list[int]], hostfile: str) -> None:
    flags = split(["--hostfile", hostfile, *words.split()])[0]
    expected = {name: list(range(each)) if isinstance(each, int) else each for name, each in devices.items()}
    assert hosts_of(flags) == expected
    # As DeepSpeed's launcher has them.
    runner = pytest.importorskip("deepspeed.launcher.runner")
    pool, filters = runner.fetch_hostfile(hostfile), (flags.get("include", ""), flags.get("exclude", ""))
    counts = (int(flags.get(name, -1)) for name in ("num_nodes", "num_accelerators"))
    assert runner.apply_num_nodes_and_gpus(runner.parse_inclusion_exclusion(pool, *filters), *counts) == expected


def test_devices_of_this_machine() -> None:
    assert hosts_of({}) is None
    assert hosts_of({"num_accelerators": "2"}) == {"localhost": [0, 1]}
    with pytest.raises(UserError, match="--include a::1: 'a::1' is not HOST or HOST:0,2"):
        hosts_of({"include": "a::1"})
    with pytest.raises(UserError, match="--exclude localhost:0@b: 'b' is not this machine, 'localhost'"):
        hosts_of({"exclude": "localhost:0@b"})
    with pytest.raises(UserError, match="--num-nodes 2 names no hosts"):
        hosts_of({"num_nodes": "2"})


SHOWN = {"DS_ACCELERATOR": "cuda"}


@pytest.mark.parametrize(
    ("flags", "variables", "ranks", "shown"),
    [
        ({}, SHOWN | {"CUDA_VISIBLE_DEVICES": "1,0"}, "2", "1,0"),
        ({"num_accelerators": "1"}, SHOWN | {"CUDA_VISIBLE_DEVICES": "GPU-8932f937,3"}, "1", "GPU-8932f937"),
        ({}, SHOWN | {"CUDA_VISIBLE_DEVICES": "MIG-8932f937"}, "1", "MIG-8932f937"),
        # Ranks on CPUs.
        *(({}, {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": each}, None, each) for each in ("-1", "", "0,1")),
        ({"num_accelerators": "4"}, {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, "4", "NoDevFiles"),
        ({}, {}, None, None),
    ],
)
def test_devices_are_those_that_are_shown(
    flags: dict[str, str], variables: dict[str, str], ranks: str | None, shown: str | None
) -> None:
    command = launched(flags, FLAGS, variables)
    assert next((word.partition("=")[2] for word in command if word.startswith("--num_acc")), None) == ranks
    assert command[-len(FLAGS) - 4 : -len(FLAGS) - 1] == (
        command[-len(FLAGS) - 4 : -len(FLAGS) - 1]
        if shown is None
        else [f"CUDA_VISIBLE_DEVICES={shown}", sys.executable, "-u"]
    )
    assert ("--no_python" in command) == ("env" in command) == (shown is not None)
    # DeepSpeed's launcher would number them from 0.
    assert "CUDA_VISIBLE_DEVICES" not in launch_variables(flags, variables)


@pytest.mark.parametrize(
    ("flags", "devices", "message"),
    [
        ({"num_accelerators": "3"}, "1,0", "CUDA_VISIBLE_DEVICES=1,0 shows 2 devices, and 3 ranks are to start"),
        ({"include": "localhost:0"}, "1,0", "CUDA_VISIBLE_DEVICES=1,0 chooses devices, and --include localhost:0"),
        ({}, "MIG-a,MIG-b", "CUDA_VISIBLE_DEVICES=MIG-a,MIG-b names MIG instances, of which CUDA shows one"),
    ],
)
def test_devices_that_are_not_shown_are_refused(flags: dict[str, str], devices: str, message: str) -> None:
    with pytest.raises(UserError) as raised:
        launched(flags, FLAGS, SHOWN | {"CUDA_VISIBLE_DEVICES": devices})
    assert str(raised.value).startswith(message)


def test_devices_of_a_hostfile(tmp_path: Path) -> None:
    path = tmp_path / "hostfile"
    path.write_text("localhost slots=1\n")
    command = launched({"hostfile": str(path)}, FLAGS, SHOWN | {"CUDA_VISIBLE_DEVICES": "3,2"})
    assert "CUDA_VISIBLE_DEVICES=3" in command and not any(word.startswith("--num_acc") for word in command)
    assert [devices_elsewhere({"CUDA_VISIBLE_DEVICES": each}) is None for each in ("0,1", "1,0", "2")] == [1, 0, 0]


@pytest.mark.parametrize(
    ("text", "more"),
    [
        ("localhost slots=2\n", ["--no_ssh_check"]),
        ("192.0.2.1 slots=2\n", ["--force_multi", "--no_ssh_check"]),
        ("\ufefflocalhost slots=1\n192.0.2.1 slots=1\n", ["--no_ssh_check"]),
    ],
)
def test_ranks_start_on_the_hosts_that_are_named(text: str, more: list[str], tmp_path: Path) -> None:
    path = tmp_path / "hostfile"
    path.write_text(text, encoding="utf-8")
    command = launched({"hostfile": str(path)}, FLAGS)
    assert [word for word in command if word in ("--force_multi", "--no_ssh_check")] == more
    assert ("--master_addr=127.0.0.1" in command) == text.startswith("localhost")
    (read,) = (word.removeprefix("--hostfile=") for word in command if word.startswith("--hostfile="))
    assert Path(read).read_bytes() == text.removeprefix("\ufeff").encode()


@pytest.mark.parametrize(
    ("flags", "programs", "code", "message"),
    [
        ({}, (), 0, "--launcher pdsh needs the program pdsh, which is not on the PATH"),
        ({"launcher": "slurm"}, ("pdsh",), 0, "--launcher slurm needs the program sinfo"),
        ({}, ("pdsh", "ssh"), 255, r"ssh does not reach a \(no route\), b \(no route\): set up ssh"),
        ({}, ("pdsh", "ssh"), 0, None),
    ],
)
def test_hosts_are_reached_before_the_start(
    flags: dict[str, str],
    programs: tuple[str, ...],
    code: int,
    message: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in programs:
        (tmp_path / name).write_text(f"#!/bin/sh\necho no route >&2\nexit {code}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    variables = launch_variables({"hostfile": "h"}, {"PATH": str(tmp_path)})
    with nullcontext() if message is None else pytest.raises(UserError, match=message):
        check_reachable(flags, {"a": [0], "b": [0]}, variables)


@pytest.mark.parametrize("value", ['a"b', "a$HOME", "`id`", "a\\b", "'a b'"])
def test_lines_that_the_shells_of_hosts_change(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path(".deepspeed_env").write_text("A=a b;c(d)\n")
    check_environment_file()
    Path(".deepspeed_env").write_text(f"A=1\nB={value}\n")
    with pytest.raises(
        UserError, match=r"^line [24] of .deepspeed_env has .* in the value of B; the shells of the hosts"
    ):
        check_environment_file()


BEGIN = [sys.executable, "-m", "megatron_terapipe.command.launcher_process"]
END = ["--log_level=error", "--no_local_rank", str(ROOT / "pretrain_gpt.py"), *FLAGS]


@pytest.mark.parametrize(
    ("words", "launcher"),
    [
        ([], ["--master_port=20000"]),
        (["--num-accelerators", "2"], ["--num_accelerators=2", "--master_port=20000"]),
        (["--hostfile", "HOSTFILE"], ["--hostfile=HOSTFILE"]),
        (["--hostfile", "HOSTFILE", "--num-nodes", "2"], ["--hostfile=HOSTFILE", "--num_nodes=2"]),
        (["--hostfile", "HOSTFILE", "--include", "a@b:0,1"], ["--hostfile=HOSTFILE", "--include=a@b:0,1"]),
        (["--hostfile", "HOSTFILE", "--exclude", "c"], ["--hostfile=HOSTFILE", "--exclude=c"]),
        (
            [
                "--hostfile",
                "HOSTFILE",
                "--num-nodes",
                "2",
                "--launcher",
                "slurm",
                "--launcher-args=--ntasks-per-node=4",
            ],
            ["--hostfile=HOSTFILE", "--num_nodes=2", "--launcher=slurm", "--launcher_args=--ntasks-per-node=4"],
        ),
        (["--master-addr", "a", "--master-port", "29400"], ["--master_addr=a", "--master_port=29400"]),
    ],
)
def test_words_of_the_launcher(words: list[str], launcher: list[str], hostfile: str) -> None:
    words = [word.replace("HOSTFILE", hostfile) for word in words]
    launching, training = split([*words, *FLAGS])
    assert training == FLAGS
    own_check = [] if "hostfile" not in launching or "slurm" in words else ["--no_ssh_check"]
    assert launched(launching, training, {}) == [
        *BEGIN,
        *(word.replace("HOSTFILE", hostfile) for word in launcher),
        *(*END[:2], *own_check, *END[2:]),
    ]


def test_deepspeed_takes_every_flag_that_is_passed_on(monkeypatch: pytest.MonkeyPatch, hostfile: str) -> None:
    runner = pytest.importorskip("deepspeed.launcher.runner")
    given = f"--hostfile {hostfile} --launcher pdsh --launcher-args=-x --master-addr a --master-port 1".split()
    expected = {"hostfile": hostfile, "launcher": "pdsh", "launcher_args": "-x", "master_addr": "a", "master_port": 1}
    expected |= {"no_local_rank": True, "no_ssh_check": True, "user_args": FLAGS}
    for words, more in (
        ("--num-gpus 2 --num-nodes 2", {"num_gpus": 2, "num_nodes": 2}),
        ("--include a", {"include": "a", "force_multi": True}),
        ("--exclude b", {"exclude": "b"}),
    ):
        command = launched(*split([*given, *words.split(), *FLAGS]))
        read = vars(runner.parse_args(command[len(BEGIN) :]))
        assert {name: read[name] for name in expected | more} == expected | more
    command = launched({}, FLAGS, {"CUDA_VISIBLE_DEVICES": "-1"})
    read = vars(runner.parse_args(command[len(BEGIN) :]))
    assert (read["user_script"], read["user_args"][-2:], read["no_python"]) == ("env", FLAGS[-2:], True)


def test_runs_on_other_hosts_are_checked(hostfile: str) -> None:
    with pytest.raises(UserError, match="--hostfile nowhere cannot be read"):
        launched({"hostfile": "nowhere"}, FLAGS)
    with pytest.raises(UserError, match="shells of other hosts"):
        launched({"hostfile": hostfile}, ["--save", "a;b"])
    launched({}, ["--save", "a;b"])


def test_passwords_stay_here(hostfile: str) -> None:
    variables = {"PATH": "/bin", "MLFLOW_TRACKING_PASSWORD": "x"}
    assert launch_variables({}, variables) == launch_variables({}, variables | {"LOCAL_SIZE": "8"}) == variables
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


@pytest.mark.parametrize(
    ("words", "rank", "end"),
    [
        (["--num-accelerators", "2", *FLAGS], {}, [str(ROOT / "pretrain_gpt.py"), *FLAGS]),
        # A program of one's own, with its flags; it checks them in each rank.
        (["--num-accelerators", "2", *OWN, "--save", "x"], {}, ["--no_local_rank", *OWN, "--save", "x"]),
        (["--num-gpus=2", *OWN, "--dry-run"], {}, [sys.executable, "-u", *OWN, "--dry-run"]),
        ([OWN[0], "--help"], {}, [sys.executable, "-u", OWN[0], "--help"]),
        (OWN, RANK, [sys.executable, "-u", *OWN]),
    ],
)
def test_another_program_takes_the_place_of_the_process(
    words: list[str], rank: dict[str, str], end: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Replaced(BaseException):
        pass

    def execve(path: str, words: list[str], variables: dict[str, str] | None = None) -> None:
        assert (path, words[-len(end) :]) == (sys.executable, end)
        assert variables is None or variables["TERAPIPE_SAVE"] == ("x" if "x" in words else "")
        assert os.environ.get("WORLD_SIZE") == (rank.get("WORLD_SIZE") or ("2" if "--dry-run" in words else None))
        raise Replaced

    monkeypatch.chdir(tmp_path)
    Path(OWN[0]).touch()
    for name, value in rank.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(train.os, "execve", execve)
    monkeypatch.setattr(train.os, "execv", execve)
    with pytest.raises(Replaced):
        main(["train", *words])


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
    assert ranks({"hostfile": hostfile, "include": "a:1@c"}) == ["0", "3", "0", "2"]


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
    assert main(["train", "--num-accelerators", "2", "nowhere.py", "--lr", "1"]) == 2
    assert capsys.readouterr().err.startswith("error: nowhere.py is not a file: give a program that calls pretrain")


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
