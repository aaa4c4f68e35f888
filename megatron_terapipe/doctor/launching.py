"""A launch from this machine: variables and addresses of its ranks."""

import os
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires
from ipaddress import ip_address
from pathlib import Path

from megatron_terapipe.doctor import probe
from megatron_terapipe.doctor.facts import Host, Launching

EXPORTS_ALL = ("slurm",)
"""Launchers that export all variables of the launching shell to the ranks: srun --export=ALL."""

BY_HAND = ("ssh",)
"""Launchers that are started on each host, in a shell of that host."""

EXPORTED = ("NCCL", "PYTHON", "MV2", "UCX", "MLFLOW")
"""Prefixes of the variables that the launcher exports (EXPORT_ENVS of deepspeed/launcher/runner.py, 0.19.8)."""


def variables_of_rank(launching: Launching, of_host: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a rank that torch, CUDA and the network read.

    Args:
        of_host: variables of a command over ssh on its host.
    """
    if launching.hostfile is None or launching.launcher in BY_HAND:
        return dict(of_host)
    exported = launching.variables
    if launching.launcher not in EXPORTS_ALL:
        exported = {name: value for name, value in exported.items() if name.startswith(EXPORTED)}
    # Lines of .deepspeed_env, as the launcher reads them.
    parts = (line.rstrip("\n").partition("=") for line in launching.environment_file or ())
    return {**of_host, **exported, **{name.strip(): value for name, sign, value in parts if sign}}


NCCL, GLOO = "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"


def meeting_address(first: Host) -> str | None:
    """Return the address of the rendezvous: the first that `hostname -I` prints on the first host."""
    listed = first.facts.names.listed_addresses if first.facts is not None else ()
    return listed[0] if listed else None


def rank_address(launching: Launching, host: Host) -> str | None:
    """Return the address at which the ranks of a host listen for the others.

    It belongs to the interface in the variables of gloo or NCCL; else to the host's own name; else it is the first one.
    """
    if host.facts is None:
        return None
    variables = variables_of_rank(launching, host.facts.variables)
    exact = [name.strip() for name in variables.get(GLOO, "").split(",")]
    named = [each for each in host.facts.interfaces if each.name in exact]
    if NCCL in variables:
        named += [each for each in host.facts.interfaces if is_chosen(variables[NCCL], each.name)]
    own = [each for each in host.facts.names.own_addresses if not is_loopback(each)]
    candidates = [*(address for each in named for address in each.addresses), *own]
    candidates += host.facts.names.listed_addresses
    # IPv4 first, as torch does; link-local addresses need a zone, which is another on each host.
    usable = [each for each in candidates if not ip_address(each.partition("%")[0]).is_link_local]
    return next((each for each in usable if ":" not in each), usable[0] if usable else None)


def is_chosen(pattern: str, name: str) -> bool:
    """Whether NCCL uses an interface: names begin with one of a list, are one of it (=), or are none of it (^)."""
    excluded, exact = pattern.startswith("^"), pattern.lstrip("^").startswith("=")
    words = [word for word in pattern.lstrip("^").lstrip("=").split(",") if word]
    hit = name in words if exact else name.startswith(tuple(words))
    # A pattern of exclusion excludes loopback, too.
    return hit != excluded and not (excluded and name == "lo")


def is_loopback(address: str) -> bool:
    """Whether an address leads to the host itself."""
    return ip_address(address.partition("%")[0]).is_loopback


DISTRIBUTION = "megatron-terapipe"
ENVIRONMENT_FILE = ".deepspeed_env"


def launching_here(*, hostfile: str | None, launcher: str, save: str | None, master_port: int) -> Launching:
    """Return a launch from this process's directory.

    Args:
        hostfile: its path; None if only this machine is checked.
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
        programs=probe.programs(),
        variables=probe.variables(),
        environment_file=_environment_file(),
        requirements=_requirements(),
    )


def _environment_file() -> tuple[str, ...] | None:
    """Return the lines of the files that DeepSpeed's launcher reads: of the home directory, then of this one."""
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
    """Return the required packages of this project, without extras."""
    try:
        listed = requires(DISTRIBUTION) or ()
    except PackageNotFoundError:
        return None
    return tuple(each for each in listed if "extra ==" not in each)
