"""The agent on a host: answers questions, a line of JSON each, and tries links to other hosts.

Questions come on standard input, answers go to standard output. Its source is sent over ssh: it imports the standard
library, `facts` and `probe` only. It ends when its input is closed, whatever it does at that time, and leaves no
process, file or port behind: whoever asks may be interrupted, and the ssh connection may be cut.
"""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_terapipe.doctor.facts import HostFacts
from megatron_terapipe.doctor.probe import (
    devices,
    folder,
    imports,
    interfaces,
    names,
    resources,
    sees_token,
    software,
    token_path,
    variables,
    write_token,
)

TOKEN_BYTES = 16
LIMIT_S = 3.0
"""Seconds for a connection, and without any byte on one."""

ROUND_TRIPS = 20
BUFFER_BYTES = 2**20
ECHO, SINK = b"e", b"s"


class Listener:
    """A port on which threads answer until this process ends.

    Args:
        port: to listen on; 0 = any that is free.

    Raises:
        OSError: if the port is taken.
    """

    def __init__(self, port: int, token: str) -> None:
        self._token = bytes.fromhex(token)
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._server = socket.create_server(("", port), family=family, backlog=128, dualstack_ipv6=both)
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Listen no more."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                threading.Thread(target=self._answer, args=[connection], daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.settimeout(2 * LIMIT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(self._token)
            wanted = connection.recv(1)
            if wanted == ECHO:
                while byte := connection.recv(1):
                    connection.sendall(byte)
            elif wanted == SINK:
                buffer, received = bytearray(BUFFER_BYTES), 0
                while count := connection.recv_into(buffer):
                    received += count
                connection.sendall(received.to_bytes(8, "big"))


class WrongHost(OSError):
    """Another program answered."""


def connect(address: str, port: int, token: str) -> socket.socket:
    """Return a connection to the host that has a token.

    Raises:
        OSError: if there is none.
    """
    connection = socket.create_connection((address, port), timeout=LIMIT_S)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        shown = b""
        while len(shown) < TOKEN_BYTES and (more := connection.recv(TOKEN_BYTES - len(shown))):
            shown += more
        if shown != bytes.fromhex(token):
            raise WrongHost("another program answers there")
    except BaseException:
        connection.close()
        raise
    return connection


def round_trip_s(connection: socket.socket) -> float:
    """Return the seconds of the fastest of some round trips of one byte."""
    connection.sendall(ECHO)
    fastest = float("inf")
    for _ in range(ROUND_TRIPS):
        begun = time.perf_counter()
        connection.sendall(b".")
        if not connection.recv(1):
            raise ConnectionResetError("the connection was closed")
        fastest = min(fastest, time.perf_counter() - begun)
    return fastest


def bandwidth(connection: socket.socket, seconds: float) -> float:
    """Return bytes per second, from the first byte sent to the word that the last one came."""
    buffer = memoryview(bytes(BUFFER_BYTES))
    connection.settimeout(2 * LIMIT_S)
    connection.sendall(SINK)
    begun = time.perf_counter()
    while time.perf_counter() - begun < seconds:
        connection.sendall(buffer)
    connection.shutdown(socket.SHUT_WR)
    told = connection.recv(8)
    if len(told) < 8:
        raise ConnectionResetError("the connection was closed")
    return int.from_bytes(told, "big") / (time.perf_counter() - begun)


MARK = "doctor: "
"""Begin of an answer; shells that greet print other lines."""

TOLD_TO_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM)

DISK_S = 15.0
"""Seconds in which a disk must answer."""

LONGEST_BEGIN_S = 1.0
"""Seconds that the begin of a process takes at most."""

LIFETIME_S = 900
"""Seconds after which a probe ends by itself: a connection that is cut may never be closed."""


class Agent:
    """What a probe does, and what it has to undo."""

    def __init__(self) -> None:
        self._listeners: dict[int, Listener] = {}
        self._processes: list[subprocess.Popen[str]] = []
        self._files: list[Path] = []
        self._beginning = threading.Lock()

    def facts(
        self, python: str, packages: list[str], project: str, directory: str, checkpoints: str, hosts: list[str]
    ) -> Any:
        """Facts of this host.

        Args:
            project: folder where this project should be.
        """
        return asdict(
            HostFacts(
                software=software(python=python, packages=packages, project=project, directory=directory),
                devices=devices(),
                resources=resources(),
                interfaces=interfaces(),
                names=names(hosts),
                variables=variables(),
                folder=folder(checkpoints, DISK_S),
            )
        )

    def clock(self) -> float:
        """Seconds since 1970 by the clock of this host."""
        return time.time()

    def imports(self, variables: dict[str, str], directory: str, seconds: float) -> Any:
        """What torch and DeepSpeed say."""
        return asdict(imports(variables=variables, directory=directory, limit_s=seconds, begin=self._begin))

    def listen(self, port: int, token: str) -> int:
        """The port on which this host listens.

        Args:
            port: to listen on; 0 = any that is free.
        """
        listener = Listener(port, token)
        self._listeners[listener.port] = listener
        return listener.port

    def reach(self, address: str, port: int, token: str) -> dict[str, Any]:
        """The address of this host on a connection to another, and seconds of a round trip."""
        with connect(address, port, token) as connection:
            return {"own": connection.getsockname()[0], "round_trip_s": round_trip_s(connection)}

    def bandwidth(self, address: str, port: int, token: str, seconds: float) -> float:
        """Bytes per second to another host."""
        with connect(address, port, token) as connection:
            return bandwidth(connection, seconds)

    def write(self, directory: str, token: str) -> None:
        """Write the file that other hosts look for; it goes with this process."""
        # Known before it is there, and not written once files are taken away, so that it is never left behind.
        with self._beginning:
            self._files.append(path := token_path(directory, token))
            write_token(path, token)

    def sees(self, directory: str, token: str) -> bool:
        """Whether this host has the file of another."""
        return sees_token(directory, token)

    def end(self) -> None:
        """Undo what was done, for ever: nothing more is begun."""
        self._beginning.acquire(timeout=LONGEST_BEGIN_S)
        for listener in list(self._listeners.values()):
            listener.close()
        for process in list(self._processes):
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
        for path in list(self._files):
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def _begin(self, words: list[str], **options: Any) -> "subprocess.Popen[str]":
        with self._beginning:
            process = subprocess.Popen(words, **options)
            self._processes.append(process)
            return process


ASKED: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (
        *(Agent.facts, Agent.clock, Agent.imports, Agent.listen, Agent.reach, Agent.bandwidth),
        *(Agent.write, Agent.sees),
    )
}
"""The questions that a probe answers."""


def serve() -> None:
    """Answer until the input is closed."""
    agent = Agent()
    questions: queue.SimpleQueue[str] = queue.SimpleQueue()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    # A thread waits for them: this one may be anywhere, also in the middle of beginning what is to be undone.
    signal.pthread_sigmask(signal.SIG_BLOCK, TOLD_TO_END)
    threading.Thread(target=_wait, args=[agent], daemon=True).start()
    signal.alarm(LIFETIME_S)
    threading.Thread(target=_read, args=[questions, agent], daemon=True).start()
    while True:
        question = json.loads(questions.get())
        try:
            answer = {"answer": ASKED[question["ask"]](agent, **question["with"])}
        except OSError as error:
            answer = {"fault": _in_words(error)}
        try:
            print(MARK + json.dumps(answer), flush=True)
        except OSError:
            _leave(agent)


def _wait(agent: Agent) -> None:
    signal.sigwait(TOLD_TO_END)
    _leave(agent)


def _read(questions: "queue.SimpleQueue[str]", agent: Agent) -> None:
    for line in sys.stdin:
        questions.put(line)
    _leave(agent)


def _leave(agent: Agent) -> None:
    agent.end()
    os._exit(0)


def _in_words(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    return (os.strerror(error.errno) if error.errno else str(error)).lower()
