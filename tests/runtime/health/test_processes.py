"""The launch above a rank, the page of the ranks of a host, and the end of a process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed_ext.runtime.health.processes import (
    Ancestor,
    HostRank,
    HostRanks,
    RankMark,
    host_launcher,
    is_orphan,
    launch_of,
    states_ranks,
)

PYTHON = "/venv/bin/python3"
PER_HOST = (PYTHON, "-u", "-m", "deepspeed.launcher.launch", "--world_info=e30", "pretrain_gpt.py", "torchrun")
RUNNER = (PYTHON, "/venv/bin/deepspeed", "pretrain_gpt.py")
REMOTE = ("bash", "-c", "cd /home; python3 -u -m deepspeed.launcher.launch")
NOHUP_SHELL, TERMINAL, TMUX = ("-bash",), ("sshd: user@pts/0",), ("tmux: server",)
SERVED = ("sshd: user@notty",)


def above(*commands: tuple[str, ...]) -> list[Ancestor]:
    return [Ancestor(pid, words, 0.0) for pid, words in enumerate(commands, start=100)]


LAUNCHES = {
    "deepspeed": ((PER_HOST, RUNNER, NOHUP_SHELL, TERMINAL), 2),
    "deepspeed_as_a_module": ((PER_HOST, (PYTHON, "-m", "deepspeed.launcher.runner", "x.py"), TMUX), 2),
    "terapipe_train": ((PER_HOST, (PYTHON, "-m", "megatron_terapipe.command.launcher_process", "x.py"), TMUX), 2),
    "deepspeed_in_a_script_of_slurm": ((PER_HOST, RUNNER, ("bash", "job.sh"), ("slurmstepd: [1.batch]",)), 2),
    "pdsh": ((PER_HOST, REMOTE, SERVED, ("sshd: user [priv]",)), 3),
    "pdsh_whose_shell_has_gone": ((PER_HOST, SERVED), 2),
    "a_launcher_by_hand_in_a_terminal": ((PER_HOST, NOHUP_SHELL, TERMINAL), 1),
    "torchrun": (((PYTHON, "/venv/bin/torchrun", "pretrain_gpt.py"), NOHUP_SHELL, TERMINAL), 1),
    "torch_distributed_run": (((PYTHON, "-X", "dev", "-m", "torch.distributed.run", "x.py"), ("bash",)), 1),
    "torchrun_under_slurm": (((PYTHON, "/usr/bin/torchrun"), ("slurmstepd: [1.0]",), ("slurmstepd",)), 3),
    "mpirun": ((("mpirun", "-n", "2"), RUNNER, NOHUP_SHELL), 2),
    "orted": ((("/usr/bin/orted",), ("sshd: user@notty",)), 1),
    "srun_of_a_wrapper": ((("bash", "-c", "python3 pretrain_gpt.py"), ("slurmstepd: [7.0]",)), 2),
    "nobody": ((NOHUP_SHELL, TERMINAL), 0),
    "an_editor_named_in_a_flag": ((("vim", "torchrun"), (PYTHON, "train.py", "deepspeed")), 0),
    "init": ((("/sbin/init",),), 0),
    "a_process_without_words": (((),), 0),
}


@pytest.mark.parametrize(("commands", "length"), LAUNCHES.values(), ids=LAUNCHES)
def test_processes_of_the_user_are_no_part_of_the_launch(commands: tuple[tuple[str, ...], ...], length: int) -> None:
    processes = above(*commands)
    assert launch_of(processes) == tuple(processes[:length])


def test_under_nohup_the_connection_is_no_part_of_the_launch() -> None:
    processes = above(PER_HOST, REMOTE, SERVED)
    assert launch_of(processes, outlives_its_terminal=True) == (processes[0],)


@pytest.mark.parametrize(
    ("words", "states"),
    [
        ("deepspeed --num_gpus 2 pretrain_gpt.py", True),
        ("deepspeed -H hostfile pretrain_gpt.py", True),
        ("deepspeed --include=localhost:1 pretrain_gpt.py", True),
        ("deepspeed --master_port 1 pretrain_gpt.py --num-layers 2 --hostfile h", False),
        ("torchrun --num_gpus 2 pretrain_gpt.py", False),
    ],
)
def test_a_command_of_deepspeed_may_state_the_ranks(words: str, states: bool) -> None:
    command = ("/usr/bin/python", f"/bin/{words.split()[0]}", *words.split()[1:])
    assert states_ranks([Ancestor(2, ("bash",), 0.0), Ancestor(1, command, 0.0)]) == states


def test_ranks_of_a_host_agree_on_their_launcher() -> None:
    wrapped = above(("bash", "-c", "exec"), PER_HOST, RUNNER)
    assert host_launcher(launch_of(wrapped)) == wrapped[1]
    assert host_launcher(()) is None


def test_orphans_of_deepspeed() -> None:
    assert is_orphan((), {"CROSS_RANK": "0"})
    assert not is_orphan((), {"RANK": "0"})
    assert not is_orphan(above(PER_HOST), {"CROSS_RANK": "0"})


def test_ranks_read_entries_of_others_and_leave_no_file(tmp_path: Path) -> None:
    path = tmp_path / "page"
    pages = [HostRanks(path, 2), HostRanks(path, 2)]
    pages[0].write(0, HostRank(4, 100, RankMark.HERE))
    assert pages[1].read() == {0: HostRank(4, 100, RankMark.HERE)}
    assert path.exists(), "the other rank has yet to start"
    pages[1].write(1, HostRank(5, 101, RankMark.HERE))
    pages[0].write(0, HostRank(4, 100, RankMark.ENDING))
    assert pages[1].read() == {0: HostRank(4, 100, RankMark.ENDING), 1: HostRank(5, 101, RankMark.HERE)}
    assert not path.exists()
    assert pages[0].read()[1].rank == 5


def test_a_page_is_private_and_follows_no_link(tmp_path: Path) -> None:
    HostRanks(tmp_path / "page", 2)
    assert (tmp_path / "page").stat().st_mode & 0o777 == 0o600
    (tmp_path / "precious").write_text("precious")
    os.symlink(tmp_path / "precious", tmp_path / "link")
    with pytest.raises(OSError, match="link"):
        HostRanks(tmp_path / "link", 2)
    assert (tmp_path / "precious").read_text() == "precious"


PROGRAM = """
import atexit, sys, threading
from types import SimpleNamespace
from deepspeed_ext.runtime.health.processes import ProcessEnd

atexit.register(print, "the interpreter's own end")
end = ProcessEnd()
atexit.register(print, "other functions")
if sys.argv[1] == "left":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
if sys.argv[1] in ("group", "none"):
    sys.modules["torch.distributed"] = SimpleNamespace(is_initialized=lambda: sys.argv[1] == "group")
if sys.argv[2] == "raised":
    raise KeyError
end.code = 7
sys.exit(end.code)
"""


@pytest.mark.parametrize(("ending", "code"), [("returned", 7), ("raised", 1)])
@pytest.mark.parametrize("threads", ["none", "left", "group"])
def test_threads_do_not_run_into_the_end_of_the_interpreter(threads: str, ending: str, code: int) -> None:
    command = [sys.executable, "-c", PROGRAM, threads, ending]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    lines = ["other functions"] + ["the interpreter's own end"] * (threads == "none")
    assert (done.returncode, done.stdout.splitlines()) == (code, lines)
    assert ("KeyError" in done.stderr) == (ending == "raised")
