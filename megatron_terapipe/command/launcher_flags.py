"""The flags of `terapipe train` that are for DeepSpeed's launcher, and what they start."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec

from deepspeed_ext.plan.errors import UserError
from deepspeed_ext.plan.text.command_line import CommandParser
from deepspeed_ext.runtime.launch.launchers import LAUNCHERS, launcher_of
from megatron_terapipe.planning.stated_ranks import slots_of_hosts

RUNNER = "megatron_terapipe.command.launcher_process"
"""Module that runs what the command `deepspeed` does."""

LAUNCHERS_OF_DEEPSPEED = ("pdsh", "openmpi", "slurm", "mpich", "impi", "mvapich")

KEEP_ALIVE = "-o ServerAliveInterval=60 -o ServerAliveCountMax=30"
"""Options of ssh: it waits for a host that is lost as long as ranks do, and no longer."""


def add_launcher_flags(parser: CommandParser) -> None:
    """Add the flags that say where the ranks run."""
    group = parser.add_argument_group(
        "where it runs",
        "DeepSpeed's launcher starts one rank for each device. Without these flags: all devices of this machine.",
    )
    group.add_argument("--hostfile", metavar="FILE", help="hosts, one a line: `node1 slots=8`")
    group.add_argument(
        "--num-accelerators", "--num-gpus", type=int, metavar="N", help="ranks of each host; on CPUs, too"
    )
    group.add_argument("--num-nodes", type=int, metavar="N", help="the first N hosts of the hostfile")
    group.add_argument("--include", metavar="HOSTS", help="these hosts and devices of the hostfile alone")
    group.add_argument("--exclude", metavar="HOSTS", help="all but these hosts and devices")
    group.add_argument(
        "--launcher", choices=LAUNCHERS_OF_DEEPSPEED, help="what reaches other hosts (default: pdsh, over ssh)"
    )
    group.add_argument("--launcher-args", metavar="WORDS", help="more words for that launcher, in one text")
    group.add_argument(
        "--master-addr", metavar="HOST", help="address at which the ranks meet (default: the first host's)"
    )
    group.add_argument("--master-port", type=int, metavar="N", help="port at which they meet (default: 29500)")


def split(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split the words of a command line into flags of the launcher, by name, and all others in their order.

    Args:
        words: of the command line. A flag may be spelled with underscores, as DeepSpeed does.

    Raises:
        UserError: if a flag of the launcher has no value, or one that it does not take.
    """
    parser = CommandParser(prog="terapipe train", add_help=False)
    add_launcher_flags(parser)
    mine: list[str] = []
    others: list[str] = []
    remaining = iter(words)
    for word in remaining:
        name, equals, _ = word.partition("=")
        dashed = name.replace("_", "-") if name.startswith("--") else name
        if dashed not in parser._option_string_actions:
            others.append(word)
            continue
        value = word[len(name) + 1 :] if equals else next(remaining, None)
        if value is None or (not equals and value.startswith("--")):
            raise UserError(f"{name} has no value: write {name}=VALUE")
        mine.append(f"{dashed}={value}")
    given = vars(parser.parse_args(mine))
    for name in ("num_accelerators", "num_nodes", "master_port"):
        if given[name] is not None and given[name] < 1:
            raise UserError(f"--{name.replace('_', '-')} {given[name]} is not a whole number from 1: give one")
    return {name: str(value) for name, value in given.items() if value is not None}, others


def is_launched(flags: Mapping[str, str], variables: Mapping[str, str]) -> bool:
    """Return whether a launcher has started this process as one of its ranks.

    Args:
        flags: of the launcher, by name.

    Raises:
        UserError: if it is a rank and flags ask for more, or if it stands for tasks of Slurm that nobody started.
    """
    if not flags:
        return launcher_of(variables) is not None
    found = next((each for each in LAUNCHERS if each.rank in variables and each.sign in variables), None)
    if found is not None:
        raise UserError(
            f"--{next(iter(flags)).replace('_', '-')} is for a launcher, and this process is a rank that {found.name} "
            f"started ({found.rank} is set): drop the flag, or unset {found.rank}"
        )
    return False


def launch_command(flags: Mapping[str, str], words: Sequence[str]) -> list[str]:
    """Return the words that start DeepSpeed's launcher.

    Args:
        flags: of the launcher, by name.

    Raises:
        UserError: if the hostfile cannot be read, or other hosts would read a word otherwise.
    """
    trainer = trainer_file()
    if "hostfile" in flags:
        # DeepSpeed would train on this machine alone if the file were not there.
        slots_of_hosts(flags["hostfile"], "--hostfile")
        from megatron_terapipe.search.report.remote_words import check_remote_words

        check_remote_words([trainer, *words])
    # Ranks take their place from variables, which every launcher sets. The log of the launcher, which repeats the
    # command for each rank, would hide the lines of the trainer.
    quiet = ["--log_level=error", "--no_local_rank"]
    return [sys.executable, "-m", RUNNER, *_of_deepspeed(flags), *quiet, trainer, *words]


def launch_variables(flags: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the launcher.

    Args:
        flags: of the launcher, by name.
    """
    if "hostfile" not in flags:
        return dict(variables)
    # DeepSpeed sends MLflow's to other hosts and prints them, and the trainer reads none: passwords may be among them.
    sent = {name: value for name, value in variables.items() if not name.startswith("MLFLOW")}
    return {"PDSH_SSH_ARGS_APPEND": KEEP_ALIVE} | sent


def dry_run_words(flags: Mapping[str, str], words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the words of a dry run, and the variables that say how many ranks the launcher would start.

    Args:
        flags: of the launcher, by name.

    Raises:
        UserError: if the hostfile cannot be read, or the ranks cannot be counted without the launcher.
    """
    for name in ("include", "exclude"):
        if name in flags:
            raise UserError(
                f"--{name} {flags[name]} is not counted in a dry run: give --num-nodes and --num-accelerators, or a "
                "hostfile of these hosts"
            )
    each = int(flags["num_accelerators"]) if "num_accelerators" in flags else None
    if "hostfile" in flags:
        slots = slots_of_hosts(flags["hostfile"], "--hostfile")
        if each is None and "num_nodes" not in flags:
            return [*words, "--hostfile", flags["hostfile"]], {}
        slots = [each or count for count in slots[: int(flags.get("num_nodes", len(slots)))]]
        return list(words), _place(sum(slots), max(slots))
    return list(words), {} if each is None else _place(each, each)


def trainer_file() -> str:
    """Return the path of pretrain_gpt.py.

    Raises:
        UserError: if it is not installed.
    """
    found = find_spec("pretrain_gpt")
    if found is None or found.origin is None:
        raise UserError("pretrain_gpt.py is not installed: install this project with pip, or start in its folder")
    return os.path.abspath(found.origin)


def _of_deepspeed(flags: Mapping[str, str]) -> Iterator[str]:
    # In one word each: values such as `--ntasks-per-node=8` begin with dashes.
    yield from (f"--{name}={value}" for name, value in flags.items())


def _place(world_size: int, local_size: int) -> dict[str, str]:
    """The variables of the first rank."""
    sizes = {"WORLD_SIZE": str(world_size), "LOCAL_SIZE": str(local_size)}
    return {"RANK": "0", "LOCAL_RANK": "0", **sizes}
