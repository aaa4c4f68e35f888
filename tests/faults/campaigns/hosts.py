"""Faults of launches over several hosts: trials that are interrupted, and ranks that are killed under each launcher.

No process may be left on any host. Interrupted trials continue with the missing ones.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_terapipe.strategy import Strategy
from tests.end_to_end.hosts.network import SEARCH_PATH, Host, Network, missing, network
from tests.end_to_end.hosts.slurm import missing_slurm, slurm
from tests.end_to_end.launching import DEEPSPEED, PRETRAIN, flags, num_metrics
from tests.faults.campaign import Outcome, Settings, until

BEGUN_S = 300.0
PROMISED_S = 60.0
"""Seconds in which all processes on all hosts end."""

TRAINER = str(PRETRAIN)
MODEL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 32, "vocab_size": 512}
VARIABLES = "DS_ACCELERATOR=cpu\nOMP_NUM_THREADS=1\n"


def campaign(settings: Settings) -> Iterator[Outcome]:
    """Interrupt trials over two hosts in each way; then kill a rank under each launcher."""
    if reason := missing():
        yield Outcome(fault="a trial over hosts", tried=0, message=f"not tried: {reason}")
        return
    with network(2, settings.folder) as hosts:
        yield from _trials(hosts, settings.folder / "trials")
        folder = settings.folder / "launched"
        folder.mkdir()
        for name, words, variables in _launchers(hosts, folder):
            yield _killed_rank(hosts, name, words, variables, folder)
        if reason := missing_slurm():
            yield Outcome(fault="a rank under srun", tried=0, message=f"not tried: {reason}")
            return
        (folder / "slurm").mkdir()
        with slurm(hosts, folder / "slurm") as variables:
            for name, words in _slurm_launchers(folder):
                yield _killed_rank(hosts, name, words, variables, folder)


def _trials(hosts: Network, folder: Path) -> Iterator[Outcome]:
    """Interrupt the first trial of a command in each way, and let the same command finish."""
    folder.mkdir()
    (folder / ".deepspeed_env").write_text(VARIABLES)
    (folder / "model.json").write_text(json.dumps(MODEL))
    node = {"hosts": [host.name for host in hosts.hosts], "device": "cpu-core", "devices": 1}
    (folder / "cluster.json").write_text(json.dumps({"name": "hosts", "nodes": [node]}))
    strategy = Strategy(pipeline_parallel_size=2, global_batch_size=4, num_token_slices=2)
    (folder / "strategies.jsonl").write_text(json.dumps(strategy.to_json()) + "\n")
    first = hosts.hosts[0]
    commands: dict[str, tuple[signal.Signals, Callable[[str], bool], Host]] = {
        "Ctrl-C in the command `trial`": (signal.SIGINT, _is_trial, first),
        "SIGTERM to the command `trial`": (signal.SIGTERM, _is_trial, first),
        "kill -9 of the command `trial`": (signal.SIGKILL, _is_trial, first),
        "kill -9 of the ssh of a trial": (signal.SIGKILL, lambda line: line.startswith("ssh "), first),
        "SIGSTOP of a rank of a trial until its time is over": (signal.SIGSTOP, _is_rank, hosts.hosts[1]),
    }
    for name, (number, chosen, host) in commands.items():
        # A trial whose ssh was killed is recorded as failed, and would not be run again.
        (folder / "trials.jsonl").unlink(missing_ok=True)
        limit_s = 120 if number == signal.SIGSTOP else 900
        run = _trial(hosts, folder, iterations=10**6, limit_s=limit_s)
        # Time counts from the end of the limit where this is what ends the run.
        longest_s, broken = _made(
            hosts, run, host, lambda: _ranks_run(hosts), chosen, number, wait_s=limit_s * (limit_s < 900)
        )
        yield Outcome(fault=name, tried=1, longest_s=longest_s, promised_s=PROMISED_S, broken=tuple(broken))
    (folder / "trials.jsonl").unlink(missing_ok=True)
    code = _trial(hosts, folder, iterations=4, limit_s=900).wait(900)
    left = _left(hosts)
    broken = ["the trial was not measured"] * bool(code) + [f"{len(left)} processes left"] * bool(left)
    yield Outcome(fault="the same command again", tried=1, broken=tuple(broken))


def _trial(hosts: Network, folder: Path, *, iterations: int, limit_s: float) -> "subprocess.Popen[bytes]":
    words = [sys.executable, "-m", "megatron_terapipe.search", "trial", "model.json", "cluster.json"]
    words += ["--strategies", "strategies.jsonl", "--global-batch-size", "4", "--iterations", str(iterations)]
    words += ["--timeout-s", str(limit_s)]
    path = f"{DEEPSPEED.parent}:{os.environ['PATH']}:/usr/sbin:/sbin"
    return hosts.hosts[0].start(words, folder, PATH=path)


def _launchers(hosts: Network, folder: Path) -> Iterator[tuple[str, list[Any], dict[str, str]]]:
    """Yield launchers that are installed: name, words before the trainer's flags, variables."""
    (folder / "hostfile").write_text(hosts.hostfile())
    (folder / ".deepspeed_env").write_text(VARIABLES)
    yield "deepspeed over pdsh", [DEEPSPEED, "--hostfile", "hostfile", PRETRAIN], {}
    if shutil.which("mpirun", path=SEARCH_PATH) is not None:
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        words = ["mpirun", "-np", "2", "-hostfile", "hostfile", "-x", "PYTHONPATH", "-x", "DS_ACCELERATOR"]
        yield "mpirun", [*words, sys.executable, PRETRAIN], root
        words = [DEEPSPEED, "--hostfile", "hostfile", "--launcher", "openmpi", "--no_local_rank", PRETRAIN]
        yield "deepspeed over Open MPI", words, root


def _slurm_launchers(folder: Path) -> Iterator[tuple[str, list[Any]]]:
    yield "srun", ["srun", "-N2", "-n2", sys.executable, PRETRAIN]
    words = [DEEPSPEED, "--hostfile", "hostfile", "--launcher", "slurm", "--launcher_args=--ntasks-per-node=1"]
    yield "deepspeed over Slurm", [*words, "--no_local_rank", PRETRAIN]


def _killed_rank(hosts: Network, name: str, words: Sequence[Any], variables: dict[str, str], folder: Path) -> Outcome:
    """Kill the rank of the second host under a launcher."""
    trainer = [*flags(Path("none"), "--train-iters", 10**6, "--mock-data", "--eval-iters", 0)]
    place = trainer.index("--data-path")
    del trainer[place : place + 2]
    path = f"{DEEPSPEED.parent}:{os.environ['PATH']}:/usr/sbin:/sbin"
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    run = hosts.hosts[0].start([*words, *trainer, "--metrics-file", metrics], folder, PATH=path, **variables)
    longest_s, broken = _made(hosts, run, hosts.hosts[1], lambda: _trains(metrics), _is_rank, signal.SIGKILL)
    # Where a rank was alone on its host, its launcher is the one that knows.
    signs = ("error: rank 1", "process rank 1", "return code = -9", "Killed")
    lines = [line for line in (folder / "log.txt").read_text().splitlines() if any(sign in line for sign in signs)]
    message = lines[0].strip()[:120] if lines else ""
    broken += ["no line about the death of a rank"] * (not message) + ["exit code 0"] * (run.returncode == 0)
    return Outcome(
        fault=f"kill -9 of a rank under {name}",
        tried=1,
        longest_s=longest_s,
        promised_s=PROMISED_S,
        message=message,
        broken=tuple(broken),
    )


def _made(
    hosts: Network,
    run: "subprocess.Popen[bytes]",
    host: Host,
    begun: Callable[[], bool],
    chosen: Callable[[str], bool],
    number: signal.Signals,
    *,
    wait_s: float = 0.0,
) -> tuple[float, list[str]]:
    """Send a signal to processes once a run has begun; return the seconds to the end of all, and broken promises.

    Args:
        wait_s: seconds in which nothing need happen.
    """

    broken = [] if until(begun, BEGUN_S) else ["it did not begin"]
    for pid, line in host.processes().items():
        if chosen(line):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
    began = time.monotonic()
    if not until(lambda: run.poll() is not None and not _left(hosts), wait_s + 3 * PROMISED_S):
        left = _left(hosts)
        broken.append(f"{len(left)} processes left: {'; '.join(line[:60] for line in left)}")
        for each in hosts.hosts:
            for pid in each.processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        run.kill()
    run.wait()
    return max(0.0, time.monotonic() - began - wait_s), broken


def _is_trial(line: str) -> bool:
    return "megatron_terapipe.search trial" in line


def _is_rank(line: str) -> bool:
    words = line.split()
    return words[0].rpartition("/")[2].startswith("python") and TRAINER in words[1:3]


def _ranks_run(hosts: Network) -> bool:
    return all(any(map(_is_rank, host.processes().values())) for host in hosts.hosts)


def _trains(metrics: Path) -> bool:
    return num_metrics(metrics) > 2


def _left(hosts: Network) -> list[str]:
    """Return the command lines of processes on the hosts, without daemons."""
    daemons = ("slurmctld", "slurmd", "slurmstepd")
    lines = [line for host in hosts.hosts for line in host.processes().values()]
    return [line for line in lines if line.split()[0].rpartition("/")[2].rstrip(":") not in daemons]
