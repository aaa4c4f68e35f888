"""News of a death for ranks on other hosts, over the store where all ranks meet.

One rank of each host listens, the first; a second connection of every rank would be too many for the rank that keeps
the store. It has a connection and a thread of its own: the connection of the process group is locked while the main
thread waits for another rank, perhaps for the dead one.
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

_CONNECT_S = 5.0
"""Longest time of one attempt to connect."""


@dataclass(frozen=True, slots=True)
class Gone:
    """Somebody who is gone, so that the run ends.

    Attributes:
        what: who, and how: the beginning of the line for the user.
        said: whether the user has been told, so that nobody else need say it.
    """

    what: str
    said: bool = False


class HostNews:
    """The connection of one rank to the store.

    Args:
        attempt: how often the ranks were started: a store may outlive them.
        heard: called with what another host tells, in the thread of the connection.
        keeps_store: whether this rank keeps the store, so that nobody can ask it once this rank is gone.
    """

    def __init__(self, attempt: str, *, heard: Callable[[Gone], object], keeps_store: bool) -> None:
        self._key, self._heard, self._keeps_store = f"liveness/{attempt}/gone", heard, keeps_store
        self._to_tell: queue.SimpleQueue[Gone | None] = queue.SimpleQueue()
        self._told, self._ended = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self.connected = False
        """Whether this rank has reached the store."""

    def begin(self, address: str, port: int, *, listens: bool) -> None:
        """Connect, and listen.

        Args:
            address: of the store.
            port: of the store.
            listens: whether to listen, and not only to be ready to tell.
        """
        arguments = (address, port, listens)
        self._thread = threading.Thread(target=self._run, args=arguments, name="news of other hosts", daemon=True)
        self._thread.start()

    def tell(self, gone: Gone) -> None:
        """Tell the other hosts, unless they cannot be reached.

        Args:
            gone: who is gone.
        """
        if self._thread is None or self._ended.is_set():
            return
        self._to_tell.put(gone)
        if self._told.wait(_TELL_S) and self._keeps_store:
            time.sleep(2 * _LOOK_S)  # They have yet to look.

    def end(self) -> None:
        """Hear nothing any more: the store may go."""
        self._ended.set()
        self._to_tell.put(None)

    def _run(self, address: str, port: int, listens: bool) -> None:
        news = None if listens else self._to_tell.get()
        store = None
        while store is None and not self._ended.is_set():
            store = self._connect(address, port)
        self.connected = store is not None
        while store is not None and not self._ended.is_set():
            try:
                if news is not None:
                    store.compare_set(self._key, "", json.dumps(asdict(news)))
                    self._told.set()
                elif store.check([self._key]):
                    self._heard(Gone(**json.loads(store.get(self._key)) | {"said": True}))
                    return
            except RuntimeError:
                if not self._ended.is_set():
                    self._heard(Gone(f"the store of rank 0 at {address}:{port}, where the ranks met, is gone"))
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
