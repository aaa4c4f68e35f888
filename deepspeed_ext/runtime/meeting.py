"""The store at which the ranks meet, opened in limited time.

torch's `TCPStore` resolves the name and reads the first answer of the server without a limit: an unknown name would
hold a rank for minutes, and a foreign program on the port for ever. Threads open it and look at the place, so that the
rank ends within its timeout, with the cause, and at once by Ctrl-C.
"""

import os
import queue
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from deepspeed_ext.runtime.launch import LaunchEnvironment, MeetingError

__all__ = ["meeting_store"]

_LOOK_S = 10.0
"""Seconds between two looks at the place to meet."""

_ANSWER_S = 60.0
"""Seconds after which a server that accepts connections and does not answer is not torch's, which answers at once."""

_LISTEN_S = 0.5
"""Seconds for which a look listens: torch's server sends nothing before it is asked."""

_SILENT = "it does not answer"


def meeting_store(launch: LaunchEnvironment, timeout: timedelta, *, look_s: float = _LOOK_S) -> Any:
    """Return the store at MASTER_ADDR and MASTER_PORT, which rank 0 serves, or torchrun.

    Args:
        timeout: longest time until the store is open, and of its calls.
        look_s: seconds until it is first examined why there is no store yet, and between two examinations.

    Raises:
        MeetingError: if the name has no address, rank 0 runs on another host, or another program listens there.
        torch.distributed.DistNetworkError: if nothing listens there, or rank 0 finds its port in use.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()
    place = _Place(address, port, found, serves=serves)

    def open_store() -> None:
        # Later than all else here: torch prints its stacks when it gives up.
        longer = timeout + timedelta(seconds=_ANSWER_S)
        settings = {"is_master": serves, "wait_for_workers": False, "timeout": longer, "multi_tenant": True}
        try:
            store = dist.TCPStore(address, port, **settings)
            store.set_timeout(timeout)
            found.put(store)
        except Exception as error:
            found.put(error)

    for work in (open_store, lambda: place.look_every(look_s)):
        threading.Thread(target=work, name="meeting of the ranks", daemon=True).start()
    try:
        store = found.get(timeout=timeout.total_seconds())
    except queue.Empty:
        store = place.error or dist.DistNetworkError(place.state)
    place.ended.set()
    if isinstance(store, Exception):
        raise store
    return store


class _Place:
    """The host and port, as this rank sees them."""

    def __init__(self, address: str, port: int, found: "queue.SimpleQueue[Any]", *, serves: bool) -> None:
        self._address, self._port, self._found, self._serves = address, port, found, serves
        self.ended = threading.Event()
        self.state = "no connection yet"
        self.error: MeetingError | None = None
        """The error by which the rank ends if the store does not open."""

    def look_every(self, seconds: float) -> None:
        """Look until the end, or until it is certain that the store will not open."""
        silent_since = None
        while not self.ended.wait(seconds):
            speaks = self._look()
            silent_since = (silent_since or time.monotonic()) if self.state == _SILENT else None
            if speaks or (silent_since is not None and time.monotonic() - silent_since > _ANSWER_S):
                self._found.put(self.error)
                return

    def _look(self) -> bool:
        """Look once; return whether a server sends bytes before it is asked, which torch's never does."""
        speaks, what = False, f"MASTER_ADDR={self._address}"
        remedy = "give the name or the address of the host of rank 0"
        try:
            with socket.create_connection((self._address, self._port), timeout=_ANSWER_S) as connection:
                what = f"port {self._port} of {self._address}, where the ranks meet, belongs to another program"
                remedy = "give the launcher another with --master-port, or set MASTER_PORT for mpirun and srun"
                connection.settimeout(_LISTEN_S)
                try:
                    received = connection.recv(64)
                    # A proxy may accept connections and close them until there is a server behind it.
                    speaks, self.state = bool(received), f"it sends {received!r}" if received else "it hangs up"
                except TimeoutError:
                    self.state = _SILENT
                    what += ", or rank 0 is stopped"
        except (socket.gaierror, UnicodeError) as error:
            self.state = getattr(error, "strerror", "") or str(error)
            what += f" has no address on host {socket.gethostname()}"
        except OSError as error:
            self.state = error.strerror or str(error)
            if not self._serves:  # Rank 0 has not started yet.
                self.error = None
                return False
            what += f" is not an address of host {socket.gethostname()}, where rank 0 runs"
        self.error = MeetingError(f"{what} ({self.state}): {remedy}")
        return speaks
