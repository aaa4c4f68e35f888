"""The examination of hosts: probes, started here or over ssh, and the order of the questions to them.

First the facts of every host, then clocks, links and the shared directory, then the imports of torch and DeepSpeed, so
that no question disturbs the answer to another. Probes end with this process.
"""

import asyncio
import json
import os
import secrets
import shlex
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megatron_terapipe.doctor import probe
from megatron_terapipe.doctor.facts import Clock, Examined, Host, HostFacts, Imports, Launching, Link
from megatron_terapipe.doctor.launching import interface_of, meeting_address, rank_address, variables_of_rank

BEGIN = (
    "import json,sys,types;probe=sys.modules['probe']=types.ModuleType('probe');"
    "exec(compile(json.loads(sys.stdin.readline()),'probe','exec'),probe.__dict__);probe.serve()"
)
"""The program that another host is given on its command line: it reads the source of the probe, and begins."""

CONNECT_S = 10
LONGEST_ANSWER = 2**24
ERRORS_S = 1.0
"""Seconds in which a command that has ended must have said why."""

END_S = 3.0
"""Seconds in which a probe ends by itself once its input is closed."""


class ProbeLost(Exception):
    """A probe that did not start, or answers no more; the message is the cause."""


class Refused(Exception):
    """A question that the host could not answer; the message is the system's."""


class HostProbe:
    """A probe that runs on a host."""

    def __init__(self, process: Process, limit_s: float) -> None:
        self._process, self._limit_s = process, limit_s
        self._errors = asyncio.create_task(self._read_errors())

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> "HostProbe":
        """Return a probe that was started; whether it answers shows when it is asked.

        Raises:
            ProbeLost: if there is no such command.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                env=dict(environment),
                limit=LONGEST_ANSWER,
                start_new_session=True,  # Ctrl-C is for this process alone, which then closes the probe's input.
            )
        except OSError as error:
            raise ProbeLost(f"{command[0]}: {error.strerror}") from None
        started = cls(process, limit_s)
        started._write(Path(probe.__file__).read_text(encoding="utf-8"))
        return started

    async def ask(self, question: str, *, limit_s: float | None = None, **words: Any) -> Any:
        """Return the answer to a question.

        Args:
            limit_s: seconds in which it must be answered; None = those of this probe.

        Raises:
            ProbeLost: if there is none in time.
            Refused: if the host could not do it.
        """
        self._write({"ask": question, "with": words})
        limit_s = self._limit_s if limit_s is None else limit_s
        try:
            answer = await asyncio.wait_for(self._answer(), limit_s)
        except TimeoutError:
            await self.end()
            raise ProbeLost(f"no answer within {limit_s:.0f} s") from None
        if "fault" in answer:
            raise Refused(answer["fault"])
        return answer["answer"]

    async def end(self) -> None:
        """Let the probe undo what it did, and end it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), END_S)
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        self._errors.cancel()

    def _write(self, line: Any) -> None:
        assert self._process.stdin is not None
        # If it cannot be written, no answer comes, and that is the error.
        self._process.stdin.write(f"{json.dumps(line)}\n".encode())

    async def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            text = line.decode(errors="replace")
            if text.startswith(probe.MARK):
                return dict(json.loads(text.removeprefix(probe.MARK)))
        code = await self._process.wait()
        # What ssh leaves in the background, as its ControlPersist does, may keep this pipe open.
        done, _ = await asyncio.wait({self._errors}, timeout=ERRORS_S)
        errors = [] if self._errors.cancelled() or not done else self._errors.result()
        raise ProbeLost(errors[-1] if errors else f"the probe ended with exit code {code}")

    async def _read_errors(self) -> list[str]:
        """Return the last lines of the command's standard error."""
        assert self._process.stderr is not None
        lines: list[str] = []
        async for line in self._process.stderr:
            lines = [*lines, line.decode(errors="replace").strip()][-10:]
        return [line for line in lines if line]


def local_command() -> list[str]:
    """Return the command of a probe on this machine."""
    return [sys.executable, "-c", BEGIN]


def ssh_command(
    host: str, launching: Launching, port: int | None, environment: Mapping[str, str] = os.environ
) -> list[str]:
    """Return the command of a probe on another host, which DeepSpeed's launcher reaches in the same way.

    It has the PYTHONPATH that the launcher sets there, and the options of PDSH_SSH_ARGS_APPEND. Where the Python of the
    launch is missing, any other will do.

    Args:
        port: of sshd; None = that of ssh's settings.
    """
    path = os.pathsep.join(filter(None, [launching.directory, environment.get("PYTHONPATH")]))
    begin = f"PYTHONSAFEPATH=1 PYTHONPATH={shlex.quote(path)}; export PYTHONSAFEPATH PYTHONPATH; "
    start = f'p={shlex.quote(launching.python)}; [ -x "$p" ] || p=python3; exec "$p" -c {shlex.quote(BEGIN)}'
    options = shlex.split(environment.get("PDSH_SSH_ARGS_APPEND", ""))
    options += ["-p", str(port)] if port is not None else []
    words = ["ssh", "-x", "-a", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}", *options, host]
    # The shell of a user may be another than sh.
    return [*words, f"exec sh -c {shlex.quote(begin + start)}"]


PACKAGES = ("torch", "deepspeed", "numpy", "transformers", "flash-attn", "flash-attn-3")
"""Packages whose versions are compared, beside those that this project requires."""

CLOCK_ROUND_TRIPS = 7
SENDING_S = 0.5
"""Seconds for which each host sends to another."""

MOST_FAULTS = 3
"""Hosts that a host fails to reach before it tries no more: each may take seconds, and one firewall stops all alike."""

MOST_TRIES = 64
"""Hosts that a host tries to reach at most: of more, the next ones in the order of the hostfile."""

Say = Callable[[str], None]


class Examination:
    """The questions to all hosts, and their answers.

    Args:
        commands: that start the probe of each.
    """

    def __init__(
        self,
        launching: Launching,
        hosts: Sequence[Host],
        commands: Sequence[Sequence[str]],
        environment: Mapping[str, str],
        limit_s: float,
        say: Say,
    ) -> None:
        self._launching = launching
        self._hosts = {host.name: host for host in hosts}
        self._commands = dict(zip(self._hosts, commands, strict=True))
        self._environment, self._limit_s, self._say = environment, limit_s, say
        self._started: list[HostProbe] = []
        self._probes: dict[str, HostProbe] = {}
        self._links: list[Link] = []
        self._meeting_fault: str | None = None

    async def run(self, *, with_imports: bool) -> Examined:
        """Ask everything, and leave nothing on any host, also where this is cancelled."""
        try:
            await self._on_all("facts", self._hosts, self._begin)
            if len(self._probes) > 1:
                await self._on_all("clocks", self._answering(), self._ask_clock)
                await self._try_links()
                await self._look_for_token()
            if with_imports:
                await self._on_all("imports of torch and DeepSpeed", self._answering(), self._ask_imports)
        finally:
            await asyncio.gather(*(started.end() for started in self._started))
        return Examined(
            launching=self._launching,
            hosts=tuple(self._hosts.values()),
            links=tuple(self._links),
            meeting_fault=self._meeting_fault,
        )

    async def _on_all(self, doing: str, names: Iterable[str], task: Callable[[str], Awaitable[None]]) -> None:
        """Do something for several hosts at the same time; a host that is lost on the way is known as such."""
        waiting = dict.fromkeys(names)
        total = len(waiting)

        def say() -> None:
            hosts = f"{total - len(waiting)} of {total} hosts" if total > 1 else "this machine"
            others = f", waiting for {', '.join(list(waiting)[:3])}" if waiting and total > 1 else ""
            self._say(f"{doing}: {hosts}{others}")

        async def one(name: str) -> None:
            try:
                await task(name)
            except (ProbeLost, Refused, ValidationError) as error:
                self._probes.pop(name, None)
                lines = str(error).splitlines()
                self._learn(name, failure=lines[0] if lines else "the probe failed")
            del waiting[name]
            say()

        say()
        await asyncio.gather(*map(one, list(waiting)))

    def _answering(self) -> list[str]:
        """Return the hosts whose probe answers, in the order of the hostfile."""
        return [name for name in self._hosts if name in self._probes]

    def _learn(self, name: str, **changes: Any) -> None:
        self._hosts[name] = replace(self._hosts[name], **changes)

    def _facts(self, name: str) -> HostFacts:
        facts = self._hosts[name].facts
        assert facts is not None
        return facts

    async def _begin(self, name: str) -> None:
        from packaging.requirements import Requirement

        started = await HostProbe.start(self._commands[name], self._environment, self._limit_s)
        self._started.append(started)
        launching = self._launching
        required = [Requirement(each).name for each in launching.requirements or ()]
        answer = await started.ask(
            "facts",
            python=launching.python,
            packages=[*dict.fromkeys([*PACKAGES, *required])],
            project=launching.project,
            directory=launching.directory,
            checkpoints=launching.checkpoints,
            hosts=[each.rpartition("@")[2] for each in self._hosts],
        )
        self._probes[name] = started
        self._learn(name, facts=TypeAdapter(HostFacts).validate_python(answer))

    async def _ask_clock(self, name: str) -> None:
        clocks = []
        loop = asyncio.get_running_loop()
        for _ in range(CLOCK_ROUND_TRIPS):
            begun, begun_at = loop.time(), time.time()
            told = float(await self._probes[name].ask("clock"))
            half = (loop.time() - begun) / 2
            clocks.append(Clock(offset_s=told - (begun_at + half), uncertainty_s=half))
        self._learn(name, clock=min(clocks, key=lambda each: each.uncertainty_s))

    async def _ask_imports(self, name: str) -> None:
        answer = await self._probes[name].ask(
            "imports",
            # The probe tells why it gave up; only if it does not is it lost.
            limit_s=self._limit_s + probe.LIMIT_S,
            seconds=self._limit_s,
            variables=variables_of_rank(self._launching, self._facts(name).variables),
            directory=self._launching.directory,
        )
        self._learn(name, imports=TypeAdapter(Imports).validate_python(answer))

    async def _try_links(self) -> None:
        names = self._answering()
        tokens = {name: secrets.token_hex(probe.TOKEN_BYTES) for name in names}
        addresses = {name: rank_address(self._launching, self._hosts[name]) for name in names}
        ports: dict[str, int] = {}

        async def listen(name: str) -> None:
            ports[name] = int(await self._probes[name].ask("listen", port=0, token=tokens[name]))

        async def reach(source: str) -> None:
            place, faults = names.index(source), 0
            for target in (names[place + 1 :] + names[:place])[:MOST_TRIES]:
                address = addresses[target]
                if target in ports and address is not None and faults < MOST_FAULTS:
                    link = Link(source=source, target=target, address=address, port=ports[target])
                    faults += not await self._reach(link, tokens[target])

        await self._on_all("ports", names, listen)
        await self._try_meeting(names[0], tokens[names[0]])
        await self._on_all("connections of all hosts", self._answering(), reach)
        await self._send(tokens)

    async def _try_meeting(self, first: str, token: str) -> None:
        """Let all hosts reach the port of the first one where the ranks would meet."""
        if first != next(iter(self._hosts)) or first not in self._probes:
            return
        port, address = self._launching.master_port, meeting_address(self._hosts[first])
        try:
            await self._probes[first].ask("listen", port=port, token=token)
        except Refused as refused:
            self._meeting_fault = str(refused)
            return
        if address is None:
            return

        async def reach(source: str) -> None:
            await self._reach(Link(source=source, target=first, address=address, port=port, is_meeting=True), token)

        await self._on_all(f"port {port} of {first}", [name for name in self._answering() if name != first], reach)

    async def _reach(self, link: Link, token: str) -> bool:
        """Try a link, and return whether it is there."""
        try:
            told = await self._probes[link.source].ask("reach", address=link.address, port=link.port, token=token)
        except Refused as refused:
            self._links.append(replace(link, fault=str(refused)))
            return False
        interface = interface_of(self._facts(link.source), told["own"])
        self._links.append(replace(link, interface=interface, round_trip_s=float(told["round_trip_s"])))
        return True

    async def _send(self, tokens: Mapping[str, str]) -> None:
        """Let each host send to its next one, as stages do; hosts of one round share no link."""
        names = self._answering()
        ring = dict(zip(names, [*names[1:], *names[:1]], strict=True))
        place = {(link.source, link.target): index for index, link in enumerate(self._links) if not link.is_meeting}

        async def send(source: str) -> None:
            index = place.get((source, ring[source]))
            if index is None or self._links[index].fault is not None:
                return
            link = self._links[index]
            where: dict[str, Any] = {"address": link.address, "port": link.port, "token": tokens[link.target]}
            try:
                sent = await self._probes[source].ask("bandwidth", **where, seconds=SENDING_S)
                self._links[index] = replace(link, bandwidth=float(sent))
            except Refused as refused:
                self._links[index] = replace(link, fault=f"small messages pass, large ones do not: {refused}")

        for part in (names[:-1:2], names[1:-1:2], names[-1:]):
            if part:
                await self._on_all("bandwidth", part, send)

    async def _look_for_token(self) -> None:
        """Let the first host write a file, and the others look for it."""
        first = next(iter(self._answering()), None)
        if first is None or self._facts(first).folder.fault is not None:
            return
        where: dict[str, Any] = {"directory": self._facts(first).folder.path, "token": secrets.token_hex(8)}
        try:
            await self._probes[first].ask("write", **where)
        except Refused:
            return

        async def look(name: str) -> None:
            seen = bool(await self._probes[name].ask("sees", **where))
            facts = self._facts(name)
            self._learn(name, facts=replace(facts, folder=replace(facts.folder, sees_token=seen)))

        await self._on_all("the shared directory", self._answering(), look)
