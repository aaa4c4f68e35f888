"""Slurm's own daemons on hosts that are network namespaces, with no user but root and no secret."""

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.end_to_end.hosts.network import SEARCH_PATH, Network

PROGRAMS = ("slurmctld", "slurmd", "srun", "sinfo")
READY_S = 30

CONFIGURATION = """ClusterName=tests
SlurmctldHost={first}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SlurmdParameters=config_overrides
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={spool}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing_slurm() -> str:
    """Why Slurm cannot be started here; empty if it can."""
    absent = [program for program in PROGRAMS if shutil.which(program, path=SEARCH_PATH) is None]
    return f"not installed: {', '.join(absent)}" if absent else ""


@contextmanager
def slurm(made: Network, folder: Path) -> Iterator[dict[str, str]]:
    """Slurm on all hosts of a network, and the variables that its commands need."""
    (folder / "state").mkdir()
    nodes = "".join(f"NodeName={each.name} NodeAddr={each.address} CPUs=2 State=UNKNOWN\n" for each in made.hosts)
    path = folder / "slurm.conf"
    # Its own short folder: the name of a socket in there has 108 characters at most.
    spool = tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True)
    path.write_text(CONFIGURATION.format(first=made.hosts[0].name, folder=folder, spool=spool.name, nodes=nodes))
    # The kernel's control groups are hidden on these hosts, and which kind there would be is not to be guessed.
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    variables = {"SLURM_CONF": str(path)}
    daemons = [(made.hosts[0], ["slurmctld", "-D", "-f", path])]
    daemons += [(host, ["slurmd", "-D", "-f", path, "-N", host.name]) for host in made.hosts]
    begun = []
    try:
        for host, words in daemons:
            program = shutil.which(str(words[0]), path=SEARCH_PATH)
            command = host.command([program, *words[1:]])
            begun.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        _wait(made, variables)
        yield variables
    finally:
        for each in begun:
            each.kill()
            each.wait()
        spool.cleanup()


def _wait(made: Network, variables: dict[str, str]) -> None:
    """Wait until all nodes are ready."""
    deadline = time.monotonic() + READY_S
    states = ""
    while states.split() != ["idle"] * len(made.hosts):
        if time.monotonic() > deadline:
            raise RuntimeError(f"Slurm is not ready after {READY_S} s: {states}")
        time.sleep(0.2)
        states = made.hosts[0].run(["sinfo", "-N", "-h", "-o", "%T"], **variables).stdout
