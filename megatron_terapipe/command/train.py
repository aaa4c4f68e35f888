"""`terapipe train`: runs pretrain_gpt.py or a program like it, by DeepSpeed's launcher if no other started its ranks.

launcher flags -> parsers of the flags -> main: split the words, then launch, or train in this process
"""

import os
import sys
import traceback
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.terminal import CommandParser, run_command, up_to
from deepspeed_ext.plan.text_files import bounded_bytes
from deepspeed_ext.runtime.cuda_environment import will_use_cuda
from deepspeed_ext.runtime.launch import LAUNCHERS, launcher_of
from megatron_terapipe.arguments.parser import ALL, add_flags_of, asked_for, other_flags, read_command_line
from megatron_terapipe.command.hosts import (
    PROGRAMS,
    Hosts,
    check_environment_file,
    check_reachable,
    devices_elsewhere,
    hosts_of,
    is_here,
    own_devices,
)
from megatron_terapipe.errors import ConfigError

RUNNER = "megatron_terapipe.command.launcher_process"
"""Module that runs DeepSpeed's launcher, as the command `deepspeed` does."""

KEEP_ALIVE = "-o ServerAliveInterval=60 -o ServerAliveCountMax=30"
"""Options of ssh: it waits for a lost host as long as ranks do, and no longer."""


def add_launcher_flags(parser: CommandParser) -> None:
    """Add the flags for the hosts and devices of the ranks."""
    group = parser.add_argument_group(
        "where it runs",
        "DeepSpeed's launcher starts one rank for each device. Without these flags: all devices of this machine.",
    )
    group.add_argument("--hostfile", metavar="FILE", help="hosts, one a line: `node1 slots=8`")
    group.add_argument(
        "--num-accelerators", "--num-gpus", type=up_to(1024), metavar="N", help="ranks of each host; on CPUs, too"
    )
    group.add_argument("--num-nodes", type=up_to(10**6), metavar="N", help="the first N hosts of the hostfile")
    group.add_argument("--include", metavar="HOSTS", help="only these hosts and devices of the hostfile")
    group.add_argument("--exclude", metavar="HOSTS", help="all but these hosts and devices")
    group.add_argument(
        "--launcher", choices=tuple(PROGRAMS), help="how other hosts are reached (default: pdsh, over ssh)"
    )
    group.add_argument("--launcher-args", metavar="WORDS", help="more words for that launcher, in one text")
    group.add_argument(
        "--master-addr", metavar="HOST", help="address at which the ranks meet (default: the first host's)"
    )
    group.add_argument(
        "--master-port",
        type=up_to(65_535),
        metavar="N",
        help="port at which they meet (default: a free one; 29500 with a hostfile)",
    )


def split(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split the words of a command line into flags of the launcher, by name, and all others in their order.

    A flag may be spelled with underscores, as DeepSpeed does.
    """
    parser = CommandParser(prog="terapipe train", add_help=False)
    add_launcher_flags(parser)

    def spelled(word: str) -> str:
        name, equals, value = word.partition("=")
        dashed = name.replace("_", "-")
        return f"{dashed}{equals}{value}" if dashed in parser._option_string_actions else word

    given, others = parser.parse_known_args(list(map(spelled, words)))
    return {name: str(value) for name, value in vars(given).items() if value is not None}, others


def is_launched(flags: Mapping[str, str], variables: Mapping[str, str]) -> bool:
    """Return whether a launcher has started this process as one of its ranks."""
    if not flags:
        return launcher_of(variables) is not None
    found = next((each for each in LAUNCHERS if each.rank in variables and each.sign in variables), None)
    if found is not None:
        raise UserError(
            f"--{next(iter(flags)).replace('_', '-')} is for a launcher, and this process is a rank that {found.name} "
            f"started ({found.rank} is set): drop the flag, or unset {found.rank}"
        )
    return False


def launch_command(
    flags: Mapping[str, str], words: Sequence[str], hosts: Hosts | None, variables: Mapping[str, str] = os.environ
) -> list[str]:
    """Return the words that start DeepSpeed's launcher.

    Args:
        words: of the trainer; the first may be a program in place of pretrain_gpt.py.
    """
    from megatron_terapipe.launch.launcher import free_port, remote_words

    flags, program = dict(flags), [*([] if _has_program(words) else [trainer_file()]), *words]
    # Ranks take their place from variables, which every launcher sets. The log of the launcher, which repeats the
    # command for each rank, would hide the lines of the trainer.
    more = ["--log_level=error", "--no_local_rank"]
    if hosts is not None and "hostfile" in flags:
        program = remote_words(program, None if is_here(hosts) else Path.cwd())
        flags["hostfile"] = _readable(flags["hostfile"])
        if is_here(hosts):
            flags.setdefault("master_addr", "127.0.0.1")
        elif len(hosts) == 1:
            more.append("--force_multi")  # DeepSpeed would start its ranks here.
        if is_here(hosts) or flags.get("launcher", "pdsh") == "pdsh":
            more.append("--no_ssh_check")  # `check_reachable` has an error of one line.
    else:
        # Runs on one host must not meet.
        flags.setdefault("master_port", str(free_port()))
    if _shows_devices(variables) and ("hostfile" not in flags or (hosts is not None and is_here(hosts))):
        shown, devices = variables["CUDA_VISIBLE_DEVICES"], own_devices(hosts, flags, variables)
        if devices is not None:
            shown = ",".join(devices)
            if "hostfile" not in flags:
                flags["num_accelerators"] = str(len(devices))
        # DeepSpeed would number devices from 0, whatever they are.
        more.append("--no_python")
        program = ["env", f"CUDA_VISIBLE_DEVICES={shown}", sys.executable, "-u", *program]
    # Each in one word: values such as `--ntasks-per-node=8` begin with dashes.
    of_deepspeed = [f"--{name}={value}" for name, value in flags.items()]
    return [sys.executable, "-m", RUNNER, *of_deepspeed, *more, *program]


def _readable(hostfile: str) -> str:
    """Return the path of a hostfile for DeepSpeed: a copy in memory where the file begins with a byte-order mark."""
    content = bounded_bytes(hostfile)
    if not content.startswith(BOM_UTF8):
        return hostfile
    copy = os.memfd_create("hostfile", 0)  # The launcher, which takes the place of this process, inherits it.
    os.write(copy, content.removeprefix(BOM_UTF8))
    return f"/proc/{os.getpid()}/fd/{copy}"


def _shows_devices(variables: Mapping[str, str]) -> bool:
    """Whether CUDA_VISIBLE_DEVICES is set for ranks on CUDA or CPUs."""
    return "CUDA_VISIBLE_DEVICES" in variables and variables.get("DS_ACCELERATOR", "cpu") in ("cpu", "cuda")


def launch_variables(flags: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the launcher, without the variables of a rank."""
    from megatron_terapipe.launch.launcher import OF_A_LAUNCHER

    variables = {name: value for name, value in variables.items() if name not in OF_A_LAUNCHER}
    if "hostfile" not in flags:
        if not _shows_devices(variables):
            return variables
        own = {name: value for name, value in variables.items() if name != "CUDA_VISIBLE_DEVICES"}
        hides = will_use_cuda(own) and not will_use_cuda(variables)
        return own | ({"DS_ACCELERATOR": "cpu"} if hides else {})
    # DeepSpeed sends MLflow's to other hosts and prints them, and the trainer reads none: passwords may be among them.
    sent = {name: value for name, value in variables.items() if not name.startswith("MLFLOW")}
    return {"PDSH_SSH_ARGS_APPEND": KEEP_ALIVE} | sent


def dry_run_words(flags: Mapping[str, str], words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the words of a dry run, and the variables of the first of the ranks that the launcher would start."""
    hosts = hosts_of(flags)
    if hosts is None:
        return list(words), {}
    if flags.keys() == {"hostfile"}:
        return [*words, "--hostfile", flags["hostfile"]], {}
    sizes = [len(slots) for slots in hosts.values()]
    sizes_of_run = {"WORLD_SIZE": str(sum(sizes)), "LOCAL_SIZE": str(max(sizes))}
    return list(words), {"RANK": "0", "LOCAL_RANK": "0", **sizes_of_run}


def _has_program(words: Sequence[str]) -> bool:
    """Whether words begin with a program that calls `pretrain`: docs/how-to/own-models.md."""
    return bool(words) and words[0].endswith(".py")


def _given_to_program(words: Sequence[str]) -> dict[str, Any]:
    """Return the flags of a program that decide its start, by field; it reads and checks its flags itself."""
    if not os.path.isfile(words[0]):
        raise ConfigError(f"{words[0]} is not a file: give a program that calls pretrain, or flags of the trainer only")
    parser = CommandParser(prog=words[0], add_help=False)
    parser.add_argument("--save")
    alone = ("-h", "--help", "--help-all", "--dry-run", "--dry-run-without-files")
    parser.add_argument(*alone, "--dry_run", "--dry_run_without_files", dest="dry_run", action="store_true")
    given: dict[str, Any] = vars(parser.parse_known_args(words[1:])[0])
    return given


def trainer_file() -> str:
    """Return the path of pretrain_gpt.py."""
    found = find_spec("pretrain_gpt")
    if found is None or found.origin is None:
        raise UserError("pretrain_gpt.py is not installed: install this project with pip, or start in its folder")
    return os.path.abspath(found.origin)


OF_THE_LAUNCHER = ("hostfile",)
"""Fields of the trainer whose flag is the launcher's here; a dry run gets it back."""

DESCRIPTION = """\
Train a GPT, here or on the hosts of a hostfile.

Starts pretrain_gpt.py, or PROGRAM.py, which calls pretrain with a model of yours, by DeepSpeed's launcher. If torchrun,
srun or mpirun has started this command, it trains as one of their ranks. With --dry-run it starts no rank: it checks
everything and prints the plan of the run."""

EPILOG = """\
examples:
  %(prog)s --num-accelerators 2 --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 512 \\
      --pipeline-model-parallel-size 2 --num-token-slices 4 --micro-batch-size 1 --global-batch-size 4 \\
      --train-iters 20 --lr 1e-3 --vocab-size 1000 --mock-data
  %(prog)s --hostfile hostfile --model-preset llama2-7b --seq-length 4096 ... --dry-run
  srun --nodes 2 --ntasks-per-node 8 %(prog)s --model-preset llama2-7b --seq-length 4096 ...

Launchers, one command each: docs/how-to/launching.md."""


def build_parser(prog: str, group: str = "") -> CommandParser:
    """Return the parser, for help, of the launcher's flags and a group of the trainer's: by default those most used."""
    parser = CommandParser(
        prog=prog,
        usage=f"{prog} [flags of the launcher] [PROGRAM.py] flags of the trainer",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    parser.add_argument("--help-all", action="store_true", help="show all flags of the trainer, as --help all does")
    add_launcher_flags(parser)
    if not group:
        parser.epilog = f"{EPILOG}\n\n{other_flags(prog)}"
    add_flags_of(parser, group, without=OF_THE_LAUNCHER)
    return parser


whole_parser = partial(build_parser, group=ALL)
"""Parser of all flags, for shells."""


def main(argv: Sequence[str] | None = None, prog: str = "python -m megatron_terapipe train") -> int:
    """Train, and return the exit code of the run; the launcher, once it is started, takes the place of this process."""
    words = sys.argv[1:] if argv is None else list(argv)
    return run_command(lambda: _run(words, prog))


def _run(words: list[str], prog: str) -> int:
    if not words:
        raise ConfigError(f"no flags are given: see {prog} --help")
    # A program has help of its own.
    group = None if any(map(_has_program, ([word] for word in words))) else asked_for(words)
    if group is not None:
        build_parser(prog, group).print_help()
        return 0
    launching, training = split(words)
    # Here, so that a misspelled flag is reported before any rank is started.
    given = _given_to_program(training) if _has_program(training) else read_command_line(training).given
    if given.get("dry_run") or given.get("dry_run_without_files"):
        training, ranks = dry_run_words(launching, training)
        before = dict(os.environ)
        os.environ.update(ranks)
        try:
            return _main(training)
        finally:  # For callers in Python.
            os.environ.clear()
            os.environ.update(before)
    if is_launched(launching, os.environ):
        return _train(training)
    hosts = hosts_of(launching)
    command, variables = launch_command(launching, training, hosts), launch_variables(launching, os.environ)
    if "hostfile" in launching and hosts is not None and not is_here(hosts):
        check_environment_file()
        check_reachable(launching, hosts, variables)
        if launching.get("launcher", "pdsh") == "pdsh" and (line := devices_elsewhere(variables)):
            print(line, file=sys.stderr)
    from megatron_terapipe.training.end_of_run import LAUNCHER_REPORTS

    variables[LAUNCHER_REPORTS] = str(given.get("save") or "")
    sys.stdout.flush()
    # In place of this process: signals reach the launcher, and its exit code is that of the command.
    os.execve(command[0], command, variables)  # noqa: S606 - no shell is wanted


def _train(words: Sequence[str]) -> int:
    try:
        return _main(words)
    except OSError:
        # As in pretrain_gpt.py: a failure during a run is not bad input, and needs its traceback.
        traceback.print_exc()
        return 1


def _main(words: Sequence[str]) -> int:
    """Run the trainer here; a program takes the place of this process."""
    if _has_program(words):
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-u", *words])  # noqa: S606 - no shell is wanted
    # Imported where this process runs it.
    import pretrain_gpt

    return pretrain_gpt.main(words)
