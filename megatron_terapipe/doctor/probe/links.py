"""A port that others can try, and tries of the ports of others: whether, how soon and how fast bytes come through.

Who listens first sends its token: so who connects knows that he reached the right host, and that packets come back.
"""

import socket
import threading
import time
from contextlib import suppress

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
