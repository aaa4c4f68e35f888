"""The examination of hosts: probes, started here or over ssh, and the order of the questions to them.

Three rounds, each finished on all hosts before the next one starts: facts, links, and imports of torch and DeepSpeed.
All probes end with this process.
"""

import asyncio
import json
import os
import secrets
import shlex
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from pydantic import TypeAdapter, ValidationError

from megatron_terapipe.doctor import probe
from megatron_terapipe.doctor.checks import COMPARED
from megatron_terapipe.doctor.facts import (
    Clock,
    Examined,
    Host,
    HostFacts,
    Imports,
    Launching,
    Link,
    meeting_address,
    rank_address,
    variables_of_rank,
)

BEGIN = (
    "import json,sys,types;probe=sys.modules['probe']=types.ModuleType('probe');"
    "exec(compile(json.loads(sys.stdin.readline()),'probe','exec'),probe.__dict__);probe.serve()"
)
"""The program on the command line of another host: it reads the source of the probe from its input, and runs it."""

CONNECT_S = 10
LONGEST_ANSWER = 2**24
END_S = 3.0
"""Seconds in which a probe ends by itself once its input is closed."""

Progress = Callable[[str], None]


class ProbeLost(Exception):
    """A probe that did not start, failed or does not answer; the message is the cause."""


class HostProbe:
    """A probe that runs on a host.

    Args:
        command: that starts it.
        limit_s: seconds in which it must answer.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> None:
        self._command, self._environment, self._limit_s = command, environment, limit_s
        self._errors = tempfile.TemporaryFile()  # A file cannot fill up as a pipe can, which would stop the process.
        self._process: asyncio.subprocess.Process | None = None
        self._offsets = (-inf, inf)

    async def ask(self, question: str, *, limit_s: float | None = None, **arguments: Any) -> Any:
        """Return the answer to a question; the first one starts the probe.

        Args:
            limit_s: another limit than the probe's.

        Raises:
            ProbeLost: if there is no answer in time, or the host could not give one.
        """
        if self._process is None:
            self._process = await self._start()
            self._write(Path(probe.__file__).read_text(encoding="utf-8"))
        sent = time.time()
        self._write({"ask": question, "with": arguments})
        limit_s = limit_s or self._limit_s
        try:
            answer = await asyncio.wait_for(self._answer(self._process), limit_s)
        except TimeoutError:
            await self.end()
            raise ProbeLost(f"no answer within {limit_s:.0f} s") from None
        # The host read its clock between the question and the answer, and so at each question.
        low, high = self._offsets
        self._offsets = max(low, answer["time"] - time.time()), min(high, answer["time"] - sent)
        if "fault" in answer:
            raise ProbeLost(answer["fault"])
        return answer["answer"]

    @property
    def clock(self) -> Clock:
        """The clock of the host, after at least one answer."""
        low, high = self._offsets
        return Clock(offset_s=(low + high) / 2, uncertainty_s=abs(high - low) / 2)

    async def end(self) -> None:
        """Close the input of the probe, so that it removes its files and processes, and wait for its end."""
        self._errors.close()
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), END_S)
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def _start(self) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                *self._command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=self._errors,
                env=dict(self._environment),
                limit=LONGEST_ANSWER,
                start_new_session=True,  # Ctrl-C ends this process only, which then closes the input of the probe.
            )
        except OSError as error:
            raise ProbeLost(f"{self._command[0]}: {error.strerror}") from None

    def _write(self, line: Any) -> None:
        assert self._process is not None and self._process.stdin is not None
        # If this fails, there is no answer, and that is the error.
        self._process.stdin.write(f"{json.dumps(line)}\n".encode())

    async def _answer(self, process: asyncio.subprocess.Process) -> dict[str, Any]:
        assert process.stdout is not None
        async for line in process.stdout:
            text = line.decode(errors="replace")
            if text.startswith(probe.MARK):
                return dict(json.loads(text.removeprefix(probe.MARK)))
        code = await process.wait()
        errors: list[str] = []
        if not self._errors.closed:  # as it is where the doctor ends the probe
            self._errors.seek(0)
            errors = self._errors.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(errors) if line.strip()), None)
        raise ProbeLost(last or f"the probe ended with exit code {code}")


def local_command() -> list[str]:
    """Return the command of a probe on this machine."""
    return [sys.executable, "-c", BEGIN]


def ssh_command(host: str, launching: Launching, port: int | None) -> list[str]:
    """Return the command of a probe on another host, reached as DeepSpeed's launcher reaches it.

    It has the PYTHONPATH that the launcher sets there, and the options of PDSH_SSH_ARGS_APPEND. Where the Python of the
    launch is missing, any other is used.

    Args:
        port: of sshd; None = as in ssh's settings.
    """
    path = os.pathsep.join(filter(None, [launching.directory, os.environ.get("PYTHONPATH")]))
    begin = f"PYTHONSAFEPATH=1 PYTHONPATH={shlex.quote(path)}; export PYTHONSAFEPATH PYTHONPATH; "
    start = f'p={shlex.quote(launching.python)}; [ -x "$p" ] || p=python3; exec "$p" -c {shlex.quote(BEGIN)}'
    options = shlex.split(os.environ.get("PDSH_SSH_ARGS_APPEND", ""))
    options += ["-p", str(port)] if port is not None else []
    words = ["ssh", "-x", "-a", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}", *options, host]
    # The shell of a user may be another than sh.
    return [*words, f"exec sh -c {shlex.quote(begin + start)}"]


class Examination:
    """The questions to all hosts, and their answers.

    Args:
        commands: that start the probe of each host.
        limit_s: seconds in which a host must answer.
    """

    def __init__(
        self,
        launching: Launching,
        hosts: Sequence[Host],
        commands: Sequence[Sequence[str]],
        environment: Mapping[str, str],
        limit_s: float,
        progress: Progress,
    ) -> None:
        self._launching, self._limit_s, self._progress = launching, limit_s, progress
        self._hosts = {host.name: host for host in hosts}
        self._probes = {
            name: HostProbe(command, environment, limit_s) for name, command in zip(self._hosts, commands, strict=True)
        }
        self._tokens = {name: secrets.token_hex(probe.TOKEN_BYTES) for name in self._hosts}
        self._ports: dict[str, int] = {}
        self._links: list[Link] = []
        self._meeting_fault: str | None = None

    async def run(self, *, with_imports: bool) -> Examined:
        """Return all facts. No file, port or process is left on any host, also if this is cancelled."""
        try:
            await self._on_all("facts", self._ask_facts)
            if len(self._ports) > 1:
                await self._on_all("links", self._ask_links)
            if with_imports:
                await self._on_all("imports of torch and DeepSpeed", self._ask_imports)
        finally:
            await asyncio.gather(*(each.end() for each in self._probes.values()))
        return Examined(
            launching=self._launching,
            hosts=tuple(self._hosts.values()),
            links=tuple(self._links),
            meeting_fault=self._meeting_fault,
        )

    async def _on_all(self, round_name: str, ask: Callable[[str], Awaitable[None]]) -> None:
        """Ask all hosts that have not failed at the same time, and note those that fail now."""
        waiting = [name for name, host in self._hosts.items() if host.failure is None]
        total = len(waiting)

        def show() -> None:
            hosts = f"{total - len(waiting)} of {total} hosts" if total > 1 else "this machine"
            others = f", waiting for {', '.join(waiting[:3])}" if waiting and total > 1 else ""
            self._progress(f"{round_name}: {hosts}{others}")

        async def one(name: str) -> None:
            try:
                await ask(name)
            except (ProbeLost, ValidationError) as error:
                lines = str(error).splitlines()
                self._update(name, failure=lines[0] if lines else "the probe failed")
            waiting.remove(name)
            show()

        show()
        await asyncio.gather(*map(one, list(waiting)))

    def _update(self, name: str, **changes: Any) -> None:
        self._hosts[name] = replace(self._hosts[name], **changes)

    def _facts(self, name: str) -> HostFacts:
        facts = self._hosts[name].facts
        assert facts is not None
        return facts

    async def _ask_facts(self, name: str) -> None:
        launching = self._launching
        required = [Requirement(each).name for each in launching.requirements or ()]
        is_first, has_links = name == next(iter(self._hosts)), len(self._hosts) > 1
        ports = ([0, launching.master_port] if is_first else [0]) if has_links else []
        answer = await self._probes[name].ask(
            "facts",
            python=launching.python,
            packages=[*dict.fromkeys([*COMPARED, *required])],
            project=launching.project,
            directory=launching.directory,
            checkpoints=launching.checkpoints,
            token=self._tokens[name],
            ports=ports,
        )
        self._update(name, facts=TypeAdapter(HostFacts).validate_python(answer["facts"]))
        if has_links:
            own, *meeting = answer["listening"]
            if "fault" in own:
                raise ProbeLost(own["fault"])
            self._ports[name] = own["port"]
            self._meeting_fault = meeting[0].get("fault") if meeting else self._meeting_fault

    async def _ask_links(self, name: str) -> None:
        """Try the next host, as stages do, and the rendezvous on the first host."""
        names, first = [each for each in self._hosts if each in self._ports], next(iter(self._hosts))
        target = names[(names.index(name) + 1) % len(names)]
        links = []
        if (address := rank_address(self._launching, self._hosts[target])) is not None:
            links.append(Link(source=name, target=target, address=address, port=self._ports[target]))
        meeting = meeting_address(self._hosts[first]) if self._meeting_fault is None else None
        if meeting is not None and name != first:
            port = self._launching.master_port
            links.append(Link(source=name, target=first, address=meeting, port=port, is_meeting=True))
        folder = self._facts(first).folder if first in self._ports else None
        token = self._tokens[first]
        answer = await self._probes[name].ask(
            "links",
            targets=[
                {"address": each.address, "port": each.port, "token": self._tokens[each.target]} for each in links
            ],
            file="" if folder is None else str(Path(folder.path, f"{probe.PREFIX}{token}")),
            token=token,
        )
        self._links += [replace(link, **found) for link, found in zip(links, answer["links"], strict=True)]
        facts = self._facts(name)
        if folder is not None and folder.fault is None:
            facts = replace(facts, folder=replace(facts.folder, sees_token=answer["sees_token"]))
        self._update(name, facts=facts, clock=self._probes[name].clock)

    async def _ask_imports(self, name: str) -> None:
        answer = await self._probes[name].ask(
            "imports",
            # The probe itself ends the import at its limit, and answers.
            limit_s=self._limit_s + probe.LIMIT_S,
            seconds=self._limit_s,
            variables=variables_of_rank(self._launching, self._facts(name).variables),
            directory=self._launching.directory,
        )
        self._update(name, imports=TypeAdapter(Imports).validate_python(answer))
