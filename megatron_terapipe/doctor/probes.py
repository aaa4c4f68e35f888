"""Probes on hosts: started here or over ssh, asked, and ended with whoever asked."""

import asyncio
import json
import os
import shlex
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_terapipe.doctor.probe.agent import MARK

PACKAGE = "megatron_terapipe.doctor"
MODULES = (
    f"{PACKAGE}.facts",
    *(f"{PACKAGE}.probe.{name}" for name in ("devices", "folder", "links", "names", "resources", "software", "agent")),
)
"""What travels, in an order in which each module imports only those before it."""

BEGIN = (
    "import json,sys,types;"
    "[exec(compile(source,name,'exec'),sys.modules.setdefault(name,types.ModuleType(name)).__dict__) "
    "for name,source in json.loads(sys.stdin.readline())];"
    f"sys.modules['{PACKAGE}.probe.agent'].serve()"
)
"""The program that another host is given on its command line: it reads the modules, and begins."""

CONNECT_S = 10
LONGEST_ANSWER = 2**24
ERRORS_S = 1.0
"""Seconds in which a command that has ended must have said why."""

END_S = 3.0
"""Seconds in which a probe ends by itself once its input is closed."""


class ProbeLost(Exception):
    """A probe that did not start, or answers no more; the message says why."""


class Refused(Exception):
    """What a probe could not do; the message is the system's."""


class Probe:
    """A probe that runs on a host.

    Args:
        limit_s: seconds in which it must answer.
    """

    def __init__(self, name: str, process: Process, limit_s: float) -> None:
        self.name = name
        self._process, self._limit_s = process, limit_s
        self._errors = asyncio.create_task(self._read_errors())

    @classmethod
    async def start(cls, name: str, command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> "Probe":
        """Return a probe that was started; whether it answers shows when it is asked.

        Args:
            limit_s: seconds in which it must answer.

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
        probe = cls(name, process, limit_s)
        probe._write(json.dumps(_sources()))
        return probe

    async def ask(self, question: str, *, limit_s: float | None = None, **words: Any) -> Any:
        """Return the answer to a question.

        Args:
            limit_s: seconds in which it must be answered; None = those of this probe.

        Raises:
            ProbeLost: if there is none in time.
            Refused: if the host could not do it.
        """
        self._write(json.dumps({"ask": question, "with": words}))
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

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        # What cannot be written is said by the answer that does not come.
        self._process.stdin.write(f"{line}\n".encode())

    async def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            text = line.decode(errors="replace")
            if text.startswith(MARK):
                return dict(json.loads(text.removeprefix(MARK)))
        code = await self._process.wait()
        # What ssh leaves in the background, as its ControlPersist does, may keep this pipe open.
        done, _ = await asyncio.wait({self._errors}, timeout=ERRORS_S)
        errors = [] if self._errors.cancelled() or not done else self._errors.result()
        raise ProbeLost(errors[-1] if errors else f"the probe ended with exit code {code}")

    async def _read_errors(self) -> list[str]:
        """Return the last lines of what the command said was wrong."""
        assert self._process.stderr is not None
        lines: list[str] = []
        async for line in self._process.stderr:
            lines = [*lines, line.decode(errors="replace").strip()][-10:]
        return [line for line in lines if line]


def local_command() -> list[str]:
    """Return the command of a probe on this machine."""
    return [sys.executable, "-c", BEGIN]


def ssh_command(host: str, *, python: str, python_path: str, options: Sequence[str]) -> list[str]:
    """Return the command of a probe on another host, which DeepSpeed's launcher reaches in the same way.

    Args:
        python: path of the Python that the launcher starts there; where it is not, any other will do.
    """
    begin = f"PYTHONSAFEPATH=1 PYTHONPATH={shlex.quote(python_path)}; export PYTHONSAFEPATH PYTHONPATH; "
    start = f'p={shlex.quote(python)}; [ -x "$p" ] || p=python3; exec "$p" -c {shlex.quote(BEGIN)}'
    words = ["ssh", "-x", "-a", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}", *options, host]
    # The shell of a user may be another than sh.
    return [*words, f"exec sh -c {shlex.quote(begin + start)}"]


def ssh_options(port: int | None, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the options of ssh that a launch would use: the port, and those of PDSH_SSH_ARGS_APPEND."""
    given = shlex.split(environment.get("PDSH_SSH_ARGS_APPEND", ""))
    return [*given, *(["-p", str(port)] if port is not None else [])]


def python_path(directory: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return PYTHONPATH as DeepSpeed's launcher sets it on other hosts."""
    return os.pathsep.join(filter(None, [directory, environment.get("PYTHONPATH")]))


def _sources() -> list[tuple[str, str]]:
    found = ((name, find_spec(name)) for name in MODULES)
    return [(name, Path(spec.origin).read_text(encoding="utf-8")) for name, spec in found if spec and spec.origin]
