"""Where a launch runs: hosts and devices by the flags of the launcher, checked before DeepSpeed's launcher reads them.

DeepSpeed's launcher ends with a traceback for flags that do not fit the hostfile (`parse_resource_filter` and `main` in
deepspeed/launcher/runner.py, 0.19.8), starts the ranks of a single host here whatever its name is, and renumbers the
devices of `CUDA_VISIBLE_DEVICES`.
"""

import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from deepspeed_ext.plan.text_files import read_text
from deepspeed_ext.runtime.cuda_environment import visible_devices, will_use_cuda
from deepspeed_ext.runtime.launch import is_this_host
from megatron_terapipe.doctor.facts import environment_lines, line_that_changes
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.launch.hostfile import parse_hostfile

HERE = "localhost"
"""Name of this machine where there is no hostfile."""

PROGRAMS = {
    **{"pdsh": "pdsh", "openmpi": "ompi_info", "slurm": "sinfo"},
    **{"mpich": "mpirun", "impi": "mpirun", "mvapich": "mpiname"},
}
"""Launchers that DeepSpeed starts, each with the program by which it finds them."""

_AT_ONCE = 64
"""Hosts that are asked at a time."""

_SSH_S = 60
"""Seconds in which a host answers; the shell of a user may wait for a file server."""

Hosts = dict[str, list[int]]
"""Devices of each host, by number."""


def hosts_of(flags: Mapping[str, str]) -> Hosts | None:
    """Return the devices that a launch uses on each host; None if no flag states them."""
    filters = [each for each in ("include", "exclude") if each in flags]
    both = filters + [each for each in ("num_nodes", "num_accelerators") if each in flags]
    if len(both) > 1 and filters:
        given = " and ".join(_written(flags, each) for each in both)
        raise ConfigError(f"{given} do not go together: give one filter, or numbers")
    each = int(flags["num_accelerators"]) if "num_accelerators" in flags else None
    if "hostfile" not in flags:
        if int(flags.get("num_nodes", 1)) > 1:
            raise ConfigError(f"{_written(flags, 'num_nodes')} names no hosts: give them by --hostfile")
        for name in filters:
            if (other := next((host for host, _ in _parts(flags, name) if host != HERE), None)) is not None:
                raise ConfigError(
                    f"{_written(flags, name)}: {other!r} is not this machine, {HERE!r}: give other hosts by --hostfile"
                )
        return None if each is None else {HERE: list(range(each))}
    listed = parse_hostfile(read_text(flags["hostfile"], "--hostfile"), flags["hostfile"])
    if not Path(flags["hostfile"]).is_file():  # DeepSpeed would train only on this machine.
        raise ConfigError(f"--hostfile {flags['hostfile']} is a pipe, which can be read once: give a file")
    hosts: Hosts = {host.name: list(range(host.slots)) for host in listed}
    if "num_nodes" in flags:
        number = int(flags["num_nodes"])
        if number > len(hosts):
            raise ConfigError(f"--num-nodes {number}, but the hostfile names {len(hosts)}: give at most {len(hosts)}")
        hosts = dict(list(hosts.items())[:number])
    if each is not None:
        few = next((name for name, slots in hosts.items() if len(slots) < each), None)
        if few is not None:
            raise ConfigError(
                f"--num-accelerators {each}, but the hostfile has slots={len(hosts[few])} for host {few}: raise the "
                "slots, or lower the number"
            )
        hosts = {name: slots[:each] for name, slots in hosts.items()}
    if filters:
        chosen = {name: slots or hosts[name] for name, slots in _chosen(flags, filters[0], hosts).items()}
        if filters == ["include"]:
            hosts = {name: chosen[name] for name in hosts if name in chosen}
        else:
            left = {name: [each for each in hosts[name] if each not in chosen.get(name, ())] for name in hosts}
            hosts = {name: slots for name, slots in left.items() if slots}
        if not any(hosts.values()):
            raise ConfigError(f"{_written(flags, filters[0])} leaves no device: name fewer")
    return hosts


def _chosen(flags: Mapping[str, str], name: str, hosts: Hosts) -> Hosts:
    """Return the slots that a filter names of each host, sorted as DeepSpeed does; none for a whole host."""
    chosen: Hosts = {}
    where = f"{_written(flags, name)}: "
    for host, slots in _parts(flags, name):
        if host not in hosts:
            known = ", ".join(list(hosts)[:8])
            raise ConfigError(f"{where}{host!r} is not a host of {flags['hostfile']}: the hosts are {known}")
        if wrong := sorted({*slots} - {*hosts[host]}):
            count = len(hosts[host])
            raise ConfigError(f"{where}host {host} has no slot {wrong[0]}: its {count} slots are numbered from 0")
        chosen[host] = sorted({*chosen.get(host, ()), *slots})
    return chosen


def _parts(flags: Mapping[str, str], name: str) -> list[tuple[str, list[int]]]:
    """Return the hosts of a filter, each with its slots."""
    parts = [part.partition(":") for part in flags[name].split("@")]
    for host, colon, slots in parts:
        if not re.fullmatch(r"\d{1,6}(,\d{1,6})*" if colon else "", slots):
            raise ConfigError(
                f"{_written(flags, name)}: {host + colon + slots!r} is not HOST or HOST:0,2, with @ between them: give "
                "hosts with a user or an address of IPv6 a name of their own in ssh's settings and the hostfile"
            )
    return [(host, [int(slot) for slot in slots.split(",") if slot]) for host, _, slots in parts]


def _written(flags: Mapping[str, str], name: str) -> str:
    return f"--{name.replace('_', '-')} {flags[name]}"


def is_here(hosts: Hosts) -> bool:
    """Whether all ranks are on this host, which needs no ssh."""
    return len(hosts) == 1 and is_this_host(next(iter(hosts)))


def check_environment_file() -> None:
    """Check the lines of .deepspeed_env, which DeepSpeed's launcher hands to the shells of the hosts."""
    lines = environment_lines()
    if lines is not None and (found := line_that_changes(lines)) is not None:
        raise ConfigError(f"{found.found}; {found.rule}: {found.remedy}")


def check_reachable(flags: Mapping[str, str], hosts: Hosts, variables: Mapping[str, str]) -> None:
    """Check that ssh reaches all hosts, as pdsh will; other launchers have ways of their own, if they are installed."""
    launcher = flags.get("launcher", "pdsh")
    if shutil.which(PROGRAMS[launcher], path=variables.get("PATH")) is None:
        raise ConfigError(
            f"--launcher {launcher} needs the program {PROGRAMS[launcher]}, which is not on the PATH: install it, or "
            f"give another of {', '.join(PROGRAMS)}"
        )
    if launcher != "pdsh":
        return
    options = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10", *shlex.split(variables["PDSH_SSH_ARGS_APPEND"])]

    def fault(host: str) -> str | None:
        words = ["ssh", *options, host, "true"]
        try:
            done = subprocess.run(
                words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_SSH_S
            )
        except subprocess.TimeoutExpired:
            return f"{host} (no answer within {_SSH_S} s)"
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return f"{host} ({lines[-1].strip()})" if done.returncode else None

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = [each for each in pool.map(fault, hosts) if each]
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise ConfigError(
            f"ssh does not reach {', '.join(found[:3])}{more}: set up ssh without a password, or drop it from the "
            "hostfile; terapipe doctor --hostfile examines all"
        )


def devices_elsewhere(variables: Mapping[str, str]) -> str | None:
    """Return a warning where CUDA_VISIBLE_DEVICES chooses devices and pdsh starts ranks on other hosts."""
    listed = visible_devices(variables)
    if listed is None or listed == list(map(str, range(len(listed)))):
        return None
    return (
        f"warning: CUDA_VISIBLE_DEVICES={variables['CUDA_VISIBLE_DEVICES']} does not reach the hosts of the hostfile, "
        "where ranks get devices from 0: choose others by --include"
    )


def own_devices(hosts: Hosts | None, flags: Mapping[str, str], variables: Mapping[str, str]) -> list[str] | None:
    """Return the devices of CUDA_VISIBLE_DEVICES for the ranks of this machine; None if it does not decide.

    Numbers, UUIDs and MIG instances stay as they were given, in their order: they are those that Slurm allotted.
    """
    if not will_use_cuda(variables) or (listed := visible_devices(variables)) is None:
        return None
    stated = f"CUDA_VISIBLE_DEVICES={variables['CUDA_VISIBLE_DEVICES']}"
    if filters := [name for name in ("include", "exclude") if name in flags]:
        raise ConfigError(f"{stated} chooses devices, and {_written(flags, filters[0])} does, too: drop one of them")
    number = len(listed) if hosts is None else len(next(iter(hosts.values())))
    if number > len(listed):
        raise ConfigError(f"{stated} shows {len(listed)} devices, and {number} ranks are to start: give a lower number")
    if number > 1 and any(each.startswith("MIG-") for each in listed):
        # NVIDIA's MIG User Guide, CUDA Device Enumeration; and no instance reaches another by NVLink or PCIe.
        raise ConfigError(
            f"{stated} names MIG instances, of which CUDA shows one to a process: add --num-accelerators 1"
        )
    return listed[:number]
