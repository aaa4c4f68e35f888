"""Whether the probe answered: hosts that ssh does not reach, and the programs that launchers need."""

import re
from collections.abc import Iterator

from megatron_terapipe.doctor.facts import Examined
from megatron_terapipe.doctor.findings import Finding, error, ok

REMEDIES = (
    (r"permission denied", "put your public key there (ssh-copy-id HOST), and start an ssh-agent if it has a password"),
    (r"host key verification failed|host identification has changed", "run ssh HOST once and look at its key"),
    (r"could not resolve|name or service not known", "write the name into /etc/hosts, ~/.ssh/config or the DNS"),
    (r"connection refused", "start sshd there, or name its port with --ssh-port"),
    (r"timed out|no route|no answer|unreachable", "start the host, or open port 22 of it; --timeout waits for longer"),
    (
        r"not found|no such file|SyntaxError|TypeError",
        "install Python 3.11 or later there, at the path that it has here",
    ),
)
"""What ssh says, and what mends it."""

LAUNCHERS = {"pdsh": ("pdsh", "ssh"), "openmpi": ("mpirun",), "slurm": ("srun",), "mpich": ("mpiexec",), "ssh": ()}
"""Programs that each launcher needs; `ssh` stands for torchrun and others that are started by hand on each host."""

EVERYWHERE = ("openmpi", "mpich")
"""Launchers whose program must be on all hosts."""


BY_SSH = ("pdsh", "openmpi", "mpich")
"""Launchers that start the ranks of other hosts over ssh."""


def reached(examined: Examined) -> Iterator[Finding]:
    """Yield whether the probe of each host answered."""
    for host in examined.hosts:
        if host.failure is None:
            yield ok("reach", host.name, "the probe answered")
            continue
        remedy = next((remedy for sign, remedy in REMEDIES if re.search(sign, host.failure, re.IGNORECASE)), None)
        remedy = (remedy or "run ssh HOST by hand").replace("HOST", host.name)
        who = "the launcher" if examined.launching.launcher in BY_SSH else "the doctor"
        rule = f"{who} must reach it by ssh without a password" if len(examined.hosts) > 1 else "it must answer"
        yield error("reach", host.name, host.failure, rule, remedy)


def launchers(examined: Examined) -> Iterator[Finding]:
    """Yield whether the programs of the launcher are there; one host needs none."""
    if len(examined.hosts) < 2:
        return
    launching = examined.launching
    places: list[tuple[str | None, dict[str, str]]] = [(None, launching.programs)]
    if launching.launcher in EVERYWHERE:
        places += [(host.name, facts.software.programs) for host, facts in examined.reached]
    for host, programs in places:
        for program in LAUNCHERS[launching.launcher]:
            if program in programs:
                yield ok("launcher", host, f"{program} is {programs[program]}")
            else:
                yield error(
                    "launcher",
                    host,
                    f"no {program} on the PATH{'' if host is not None else ' of this machine'}",
                    f"--launcher {launching.launcher} needs it",
                    f"install {program}, or choose another launcher",
                )


def one_machine(examined: Examined) -> Iterator[Finding]:
    """Yield whether two names of the hostfile lead to the same machine, whose devices ranks would share."""
    names: dict[tuple[str, ...], str] = {}
    for host, facts in examined.reached:
        machine = (facts.names.hostname, *facts.names.listed_addresses)
        first = names.setdefault(machine, host.name)
        if first != host.name:
            yield error(
                "hostfile",
                host.name,
                f"is the same machine as {first}",
                "ranks of both names would take the same devices",
                "name each machine once",
            )
    if len(names) == len(list(examined.reached)) > 1:
        yield ok("hostfile", None, f"{len(names)} names of {len(names)} machines")


def folders(examined: Examined) -> Iterator[Finding]:
    """Yield whether each host has the working directory, Python and this project where the launcher expects them."""
    launching = examined.launching
    digests = ((host.name, facts.software.digest) for host, facts in examined.reached)
    first, reference = next(((name, digest) for name, digest in digests if digest is not None), ("", None))
    for host, facts in examined.reached:
        software = facts.software
        if software.has_folder:
            yield ok("directory", host.name, f"has {launching.directory}")
        else:
            yield error(
                "directory",
                host.name,
                f"no directory {launching.directory}",
                "the launcher enters the directory of your shell on all hosts",
                "start from a directory that all hosts share, or make it there",
            )
        if software.python is not None:
            yield ok("python", host.name, f"has {launching.python}")
        else:
            yield error(
                "python",
                host.name,
                f"no {launching.python}",
                "the launcher starts the Python of this shell on all hosts, by its path",
                "install the same environment there at the same path, or share its folder",
            )
        if software.digest is None:
            yield error(
                "project",
                host.name,
                f"no megatron-terapipe in {launching.project}",
                "all hosts need it at the same path",
                "copy or install it there, or share its folder",
            )
        elif software.digest == reference:
            yield ok("project", host.name, f"sources {software.digest} in {launching.project}")
        else:
            yield error(
                "project",
                host.name,
                f"sources {software.digest} in {launching.project}",
                f"{first} has {reference}, and ranks of different versions do not agree",
                "install the same version there",
            )
