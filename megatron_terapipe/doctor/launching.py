"""A launch from this machine: the variables that its ranks will see, and the addresses by which they meet."""

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, requires
from ipaddress import ip_address
from pathlib import Path

from megatron_terapipe.doctor.facts import Host, HostFacts, Interface, Launching
from megatron_terapipe.doctor.probe import programs, variables

SHELL_STAYS = ("slurm",)
"""Launchers by which ranks see all variables of the launching shell: srun --export=ALL."""

BY_HAND = ("ssh",)
"""Launchers that are started on each host, in a shell that is not known here."""

HANDED_ON = ("NCCL", "PYTHON", "MV2", "UCX", "MLFLOW")
"""Beginnings of the names of those that the launcher hands on (EXPORT_ENVS of deepspeed/launcher/runner.py, 0.19.8)."""


def variables_of_rank(launching: Launching, of_host: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a rank, as far as torch, CUDA and the network read them.

    Args:
        of_host: what a command over ssh finds on the host.
    """
    if launching.hostfile is None or launching.launcher in BY_HAND:
        return dict(of_host)
    if launching.launcher in SHELL_STAYS:
        return {**of_host, **launching.variables, **written(launching.environment_file or ())}
    handed = {name: value for name, value in launching.variables.items() if name.startswith(HANDED_ON)}
    return {**of_host, **handed, **written(launching.environment_file or ())}


def written(lines: Sequence[str]) -> dict[str, str]:
    """Return the variables of .deepspeed_env, as the launcher reads its lines."""
    parts = (line.rstrip("\n").partition("=") for line in lines)
    return {name.strip(): value for name, sign, value in parts if sign}


NCCL, GLOO = "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"


def meeting_address(first: Host) -> str | None:
    """Return the address at which DeepSpeed lets ranks meet: the first that `hostname -I` prints on the first host."""
    listed = first.facts.names.listed_addresses if first.facts is not None else ()
    return listed[0] if listed else None


def rank_address(launching: Launching, host: Host) -> str | None:
    """Return the address at which the ranks of a host listen for the others.

    It is that of the interface that a variable names; else the host's own name, which gloo looks up; else the first
    that it has.
    """
    if host.facts is None:
        return None
    named = named_interfaces(variables_of_rank(launching, host.facts.variables), host.facts.interfaces)
    own = [each for each in host.facts.names.own_addresses if not is_loopback(each)]
    candidates = [*(address for each in named for address in each.addresses), *own]
    candidates += host.facts.names.listed_addresses
    # IPv4 first, as torch does; addresses of one link alone need a zone, which other hosts name otherwise.
    usable = [each for each in candidates if not ip_address(each.partition("%")[0]).is_link_local]
    return next((each for each in usable if ":" not in each), usable[0] if usable else None)


def named_interfaces(variables: dict[str, str], interfaces: Sequence[Interface]) -> list[Interface]:
    """Return the interfaces that the variables of NCCL and gloo name, those of gloo first."""
    exact = [name.strip() for name in variables.get(GLOO, "").split(",") if name.strip()]
    found = [each for each in interfaces if each.name in exact]
    return [*found, *(each for each in interfaces if NCCL in variables and is_chosen(variables[NCCL], each.name))]


def is_chosen(pattern: str, name: str) -> bool:
    """Whether NCCL takes an interface: names begin with one of a list, are one of it (=), or are none of it (^)."""
    excluded, exact = pattern.startswith("^"), pattern.lstrip("^").startswith("=")
    words = [word for word in pattern.lstrip("^").lstrip("=").split(",") if word]
    hit = name in words if exact else name.startswith(tuple(words))
    # Without a name NCCL leaves out loopback and containers' bridges where there is another.
    return hit != excluded and not (excluded and name == "lo")


def interface_of(facts: HostFacts, address: str) -> str | None:
    """Return the name of the interface that has an address.

    Args:
        address: as the system says it, perhaps an IPv4 one in the clothes of IPv6.
    """
    plain = address.removeprefix("::ffff:").partition("%")[0]
    return next((each.name for each in facts.interfaces if plain in each.addresses), None)


def is_loopback(address: str) -> bool:
    """Whether an address leads to the host itself."""
    return ip_address(address.partition("%")[0]).is_loopback


DISTRIBUTION = "megatron-terapipe"
ENVIRONMENT_FILE = ".deepspeed_env"


def launching_here(*, hostfile: str | None, launcher: str, save: str | None, master_port: int) -> Launching:
    """Return how a launch would start from this process's directory.

    Args:
        hostfile: its path; None if only this machine is looked at.
        save: the directory for checkpoints; None = the working directory.
    """
    directory = os.getcwd()
    return Launching(
        hostfile=hostfile,
        launcher=launcher,
        python=sys.executable,
        project=str(Path(__file__).resolve().parents[2]),
        directory=directory,
        checkpoints=os.path.abspath(save or directory),
        save_is_given=save is not None,
        master_port=master_port,
        programs=programs(),
        variables=variables(),
        environment_file=_environment_file(),
        requirements=_requirements(),
    )


def _environment_file() -> tuple[str, ...] | None:
    """Return the lines of the files that DeepSpeed's launcher reads, the one of the home directory first."""
    name = os.environ.get("DS_ENV_FILE", ENVIRONMENT_FILE)
    lines: list[str] | None = None
    for folder in (Path.home(), Path()):
        try:
            text = (folder / name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        lines = [*(lines or ()), *text.splitlines()]
    return None if lines is None else tuple(lines)


def _requirements() -> tuple[str, ...] | None:
    """Return what this project needs of packages in every installation."""
    try:
        listed = requires(DISTRIBUTION) or ()
    except PackageNotFoundError:
        return None
    return tuple(each for each in listed if "extra ==" not in each)
