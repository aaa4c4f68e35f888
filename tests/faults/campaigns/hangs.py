"""Ranks that hang: stopped wherever they are, on a host that is cut off, or with a link that loses packets.

Each must be found within the timeout and named by one line, with the ledgers of the others written; all processes must
end, and the run must resume from its last checkpoint with equal losses.
"""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_ext.runtime.health.processes import STALLED
from tests.end_to_end.corpus import write_corpus
from tests.end_to_end.hosts.network import Host, Network, missing, network
from tests.end_to_end.launching import (
    DEEPSPEED,
    PRETRAIN,
    WITHOUT_ZERO,
    Launch,
    environment,
    flags,
    losses,
    num_metrics,
)
from tests.faults.campaign import Outcome, Settings, ending, forked, until
from tests.faults.stop_at import PLACES, RUN_AT_START, STOPPED

TIMEOUT_MINUTES = 0.25
PROMISED_S = 60 * TIMEOUT_MINUTES + 30
"""Seconds in which all processes end."""

SSH_S = 15
"""Seconds after which ssh ends a connection; they may begin when the ranks have ended."""

LAYOUTS = {
    "2 stages": (),
    "2 replicas": ("--pipeline-model-parallel-size", 1),
    "2 tensor-parallel ranks": ("--pipeline-model-parallel-size", 1, "--tensor-model-parallel-size", 2),
}
"""Flags of each layout of two ranks."""

QUICK = (
    *(("2 stages", "op", 1), ("2 replicas", "building", 1), ("2 tensor-parallel ranks", "saving", 0)),
    ("2 stages", "leaving", 0),
)
"""Layout, place and rank of the stops that a quick campaign makes."""

_SAVES = (*WITHOUT_ZERO, "--save", "save", "--save-interval", 2, "--metrics-file", "metrics.jsonl")
_WITH_TIMEOUT = (*_SAVES, "--distributed-timeout-minutes", TIMEOUT_MINUTES)


def campaign(settings: Settings) -> Iterator[Outcome]:
    """Stop each rank at each place in each layout; then cut off a host, and let a link lose packets."""
    data = write_corpus(settings.folder)
    references: dict[str, list[float]] = {}
    for layout in LAYOUTS:
        for place in PLACES:
            for rank in (0, 1):
                if settings.quick and (layout, place, rank) not in QUICK:
                    continue
                if layout not in references:
                    folder = settings.folder / layout.replace(" ", "-")
                    folder.mkdir()
                    assert forked(folder, flags(data, *LAYOUTS[layout], *_SAVES)).code == 0
                    references[layout] = losses(folder / "metrics.jsonl")
                folder = settings.folder / f"{layout}-{place}-{rank}".replace(" ", "-")
                yield _Stop(layout, place, rank, folder, data).outcome(references[layout])
    yield from _between_hosts(settings, data)


@dataclass(frozen=True)
class _Stop:
    """A rank that is stopped."""

    layout: str
    place: str
    rank: int
    folder: Path
    data: Path

    def outcome(self, expected: list[float]) -> Outcome:
        """Stop the rank, wait for the end, and resume the run."""
        self.folder.mkdir()
        (self.folder / "sitecustomize.py").write_text(RUN_AT_START)
        paths = os.pathsep.join([str(self.folder), environment()["PYTHONPATH"]])
        stops = {"STOP_AT": self.place, "STOP_RANK": str(self.rank), "PYTHONPATH": paths}
        trainer_flags = flags(self.data, *LAYOUTS[self.layout], *_WITH_TIMEOUT)
        run = Launch(self.folder, trainer_flags, **stops)
        fault = f"SIGSTOP of rank {self.rank} of {self.layout}: {self.place}"
        try:
            run.wait_for((self.folder / STOPPED).exists)
        except AssertionError:
            if run.running:
                run.kill()
            return Outcome(fault=fault, tried=0, broken=("it was not stopped",), message=run.output().splitlines()[-1])
        end = ending(run)
        died = [line for line in end.lines if re.match(rf"error: rank {self.rank} \(.*\) died: ", line)]
        # The others notice its end; a rank that joins last may not be watched yet either.
        if self.place == "meeting" or (self.place == "joining" and died):
            return end.outcome(fault, code=None, lines=died, broken=self._resumed(expected), promised_s=PROMISED_S)
        lines = [line for line in end.lines if "the run has stalled" in line]
        named = re.search(rf"rank {self.rank} (\(host \S+\) )?blocks the run", "".join(lines))
        ledger = self.folder / "save" / "stalled_pipeline" / f"rank_{1 - self.rank:05d}.json"
        broken = ["not named"] * (not named) + ["no ledger"] * (not ledger.exists()) + self._resumed(expected)
        return end.outcome(fault, code=STALLED, lines=lines[:1], broken=broken, promised_s=PROMISED_S)

    def _resumed(self, expected: list[float]) -> list[str]:
        """Start the run again, and return differences from an undisturbed run."""
        saved = (self.folder / "save" / "latest").exists()
        load = ("--load", "save") if saved else ()
        if forked(self.folder, flags(self.data, *LAYOUTS[self.layout], *_SAVES, *load)).code:
            return ["it does not continue"]
        found = losses(self.folder / "metrics.jsonl")
        first = 2 if saved else 0
        return ["other losses"] * (found[-len(expected[first:]) :] != expected[first:])


# ---------------------------------------------------------------------- two hosts


def _between_hosts(settings: Settings, data: Path) -> Iterator[Outcome]:
    if reason := missing():
        yield Outcome(fault="a host cut off the network", tried=0, message=f"not tried: {reason}")
        return
    folder = settings.folder / "hosts"
    folder.mkdir()
    with network(2, folder) as hosts:
        last = hosts.hosts[1]
        yield _HostsRun(hosts, folder / "cut", data).ended_by("a host cut off the network", lambda: hosts.cut(last))
        hosts.restore(last)
        lose = lambda: hosts.lose_large_packets(last)  # noqa: E731
        yield _HostsRun(hosts, folder / "lost", data).ended_by("a link that loses all large packets", lose)
        hosts.restore(last)
        yield _HostsRun(hosts, folder / "back", data).survives_a_cut(last)


class _HostsRun:
    """A run over two hosts that would not end by itself."""

    def __init__(self, hosts: Network, folder: Path, data: Path) -> None:
        self._hosts, self._folder = hosts, folder
        folder.mkdir()
        (folder / "hostfile").write_text(hosts.hostfile())
        (folder / ".deepspeed_env").write_text("DS_ACCELERATOR=cpu\nOMP_NUM_THREADS=1\n")
        words: list[Any] = [DEEPSPEED, "--hostfile", "hostfile", PRETRAIN]
        words += flags(data, *_WITH_TIMEOUT, "--train-iters", 10**6, "--save-interval", 10**6)
        keep_alive = f"-o ServerAliveInterval={SSH_S // 3} -o ServerAliveCountMax=3"
        self._process = hosts.hosts[0].start(words, folder, PDSH_SSH_ARGS_APPEND=keep_alive)

    def ended_by(self, name: str, make: Callable[[], object]) -> Outcome:
        """Outcome of a fault of the network that does not pass."""
        if not self._trains_on(3):
            return self._did_not_begin(name)
        make()
        began = time.monotonic()
        until(lambda: not self._left() and self._process.poll() is not None, PROMISED_S + SSH_S + 30)
        longest_s, left = time.monotonic() - began, self._left()
        code = self._end()
        lines = [line for line in self._log() if "the run has stalled" in line]
        ledgers = sorted(path.name for path in (self._folder / "save").glob("stalled_pipeline/*.json"))
        broken = [f"{len(left)} processes left: {'; '.join(line[:60] for line in left)}"] * bool(left)
        broken += ["nothing message"] * (not lines) + ["exit code 0"] * (not code)
        broken += [f"only the ledgers {', '.join(ledgers)}"] * (len(ledgers) < len(self._hosts.hosts))
        message = lines[0].partition(": ")[2] if lines else self._log()[-1]
        return Outcome(
            fault=name,
            tried=1,
            longest_s=longest_s,
            promised_s=PROMISED_S + SSH_S,
            message=message,
            broken=tuple(broken),
        )

    def survives_a_cut(self, host: Host) -> Outcome:
        """Outcome of a cut that lasts for a third of the timeout."""
        seconds = 60 * TIMEOUT_MINUTES / 3
        name = f"a host cut off the network for {seconds:.0f} s"
        if not self._trains_on(3):
            return self._did_not_begin(name)
        self._hosts.cut(host)
        time.sleep(seconds)
        self._hosts.restore(host)
        goes_on = self._trains_on(3)
        message = "it trains on" if goes_on else self._log()[-1]
        self._end()
        return Outcome(fault=name, tried=1, message=message, broken=() if goes_on else ("it does not continue",))

    def _trains_on(self, iterations: int) -> bool:
        """Whether it trains for more iterations soon."""
        wanted = self._iterations() + iterations
        until(lambda: self._iterations() >= wanted or self._process.poll() is not None, 180.0)
        return self._iterations() >= wanted

    def _iterations(self) -> int:
        return num_metrics(self._folder / "metrics.jsonl")

    def _did_not_begin(self, name: str) -> Outcome:
        self._end()
        return Outcome(fault=name, tried=0, broken=("the run did not begin",), message=self._log()[-1])

    def _left(self) -> list[str]:
        return [line for host in self._hosts.hosts for line in host.processes().values()]

    def _end(self) -> int:
        """Kill remaining processes, and return the exit code of the launcher."""
        for host in self._hosts.hosts:
            for process in host.processes():
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        return self._process.wait(30)

    def _log(self) -> list[str]:
        return (self._folder / "log.txt").read_text().splitlines() or [""]
