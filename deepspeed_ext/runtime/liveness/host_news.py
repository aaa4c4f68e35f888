"""News of a death for ranks on other hosts, over the store where all ranks meet.

One rank of each host listens, the first; a second connection of every rank would be too many for the rank that keeps
the store. It has a connection and a thread of its own: the connection of the process group is locked while the main
thread waits for another rank, perhaps for the dead one.

If nobody is left on a host, nobody tells. So the listening ranks also give signs of life. These are read only once a
rank has lost a connection: a rank that is merely stopped is the business of the stall watch.
"""

import json
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

_LOOK_S = 1.0
"""Seconds between two looks at the store."""

_TELL_S = 2.0
"""Longest time to wait until news is told: a store that is there answers sooner."""

_SILENT_S = 4.0
"""Seconds without a sign of life after which a rank is taken for dead, where a connection has been lost, too."""

_CONNECT_S = 5.0
"""Longest time of one attempt to connect."""

_PARTING_S = _CONNECT_S + 1.0
"""Longest time to wait for a thread that is to end: what it asks a store that answers takes less."""


@dataclass(frozen=True, slots=True)
class Gone:
    """Somebody who is gone, so that the run ends."""

    what: str
    """Who, and how: the beginning of the line for the user."""
    said: bool = False
    """Whether the user has been told, so that nobody else need say it."""


class HostNews:
    """The connection of one rank to the store.

    Args:
        attempt: how often the ranks were started: a store may outlive them.
        heard: called with what another host tells, in the thread of the connection.
        keeps_store: whether this rank keeps the store, so that nobody can ask it once this rank is gone.
    """

    def __init__(self, attempt: str, *, heard: Callable[[Gone], object], keeps_store: bool) -> None:
        self._prefix, self._heard, self._keeps_store = f"liveness/{attempt}", heard, keeps_store
        self._key = f"{self._prefix}/gone"
        self._to_tell: queue.SimpleQueue[Gone | None] = queue.SimpleQueue()
        self._told, self._ended = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._asked = threading.Event()
        self.connected = False
        """Whether this rank has reached the store."""

    def begin(self, address: str, port: int, *, name: str, listens: bool) -> None:
        """Connect, and listen.

        Args:
            name: of this rank, as a user reads it.
            listens: whether to listen, and not only to be ready to tell.
        """
        arguments = (address, port, name, listens)
        self._thread = threading.Thread(target=self._run, args=arguments, name="news of other hosts", daemon=True)
        self._thread.start()

    def tell(self, gone: Gone) -> None:
        """Tell the other hosts, unless they cannot be reached."""
        if self._thread is None or self._ended.is_set():
            return
        self._to_tell.put(gone)
        if self._told.wait(_TELL_S) and self._keeps_store:
            time.sleep(2 * _LOOK_S)  # They have yet to look.

    def ask(self) -> None:
        """Find out whose signs of life have stopped, because a connection is lost."""
        self._asked.set()

    def end(self) -> None:
        """Hear nothing any more: the store may go."""
        self._ended.set()
        self._to_tell.put(None)

    def join(self) -> None:
        """Wait, after `end`, for the thread: one that is left in a call to the store takes the process down with it."""
        if self._thread is not None:
            self._thread.join(_PARTING_S)

    def _run(self, address: str, port: int, name: str, listens: bool) -> None:
        news = None if listens else self._to_tell.get()
        store = None
        while store is None and not self._ended.is_set():
            store = self._connect(address, port)
        if store is None:
            return
        try:
            self._talk(store, news, _SignsOfLife(store, self._prefix, name) if listens else None)
        except RuntimeError:
            if not self._ended.is_set():
                self._heard(Gone(f"the store of rank 0 at {address}:{port}, where the ranks met, is gone"))

    def _talk(self, store: Any, news: Gone | None, signs: "_SignsOfLife | None") -> None:
        self.connected = True
        while not self._ended.is_set():
            if news is not None:
                store.compare_set(self._key, "", json.dumps(asdict(news)))
                self._told.set()
            elif store.check([self._key]):
                self._heard(Gone(**json.loads(store.get(self._key)) | {"said": True}))
                return
            elif signs is not None and (silent := signs.give_and_read(compare=self._asked.is_set())):
                own = json.dumps(asdict(Gone(f"{silent} died")))
                # Ranks of several hosts may find out; the first one says it.
                first = store.compare_set(self._key, "", own)
                self._heard(Gone(**json.loads(first) | {"said": first != own.encode()}))
                return
            news = self._wait()

    def _wait(self) -> Gone | None:
        try:
            return self._to_tell.get(timeout=_LOOK_S)
        except queue.Empty:
            return None

    def _connect(self, address: str, port: int) -> Any:
        # Torch takes seconds to import, and the main thread has done it by now.
        from torch.distributed import TCPStore

        try:
            return TCPStore(
                address, port, is_master=False, timeout=timedelta(seconds=_CONNECT_S), wait_for_workers=False
            )
        except RuntimeError:
            return None


class _SignsOfLife:
    """Signs of life of the ranks that listen, one of each host.

    Args:
        name: of this rank, as a user reads it.
    """

    def __init__(self, store: Any, prefix: str, name: str) -> None:
        self._store, self._prefix, self._name = store, prefix, name
        self._own = store.add(f"{prefix}/hosts", 1)
        self._given = 0
        self._before: dict[int, bytes] = {}
        self._since_s = 0.0

    def give_and_read(self, *, compare: bool) -> str:
        """Give a sign of life, and return the names of those that have given none for long; empty if all have.

        Args:
            compare: whether to look at others at all.
        """
        self._given += 1
        self._store.set(self._key(self._own), f"{self._given} {self._name}")
        if not compare:
            return ""
        signs = self._read()
        if not self._before:
            self._before, self._since_s = signs, time.monotonic()
        if time.monotonic() < self._since_s + _SILENT_S:
            return ""
        silent = [sign.decode().split(" ", 1)[1] for host, sign in signs.items() if self._before.get(host) == sign]
        return " and ".join(silent)

    def _read(self) -> dict[int, bytes]:
        hosts = range(1, self._store.add(f"{self._prefix}/hosts", 0) + 1)
        return {
            host: self._store.get(self._key(host))
            for host in hosts
            if host != self._own and self._store.check([self._key(host)])
        }

    def _key(self, host: int) -> str:
        return f"{self._prefix}/sign of life/{host}"
