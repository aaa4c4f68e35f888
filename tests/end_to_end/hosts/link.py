"""A link between two ports of a switch that delays frames, sends no faster than a rate, and drops some.

    python link.py PORT PORT DELAY_MS RATE_MBIT DROPPED [SEED]

It runs in the namespace of the switch, in place of its bridge. The kernels of small machines have no netem, which would
do this. A rate of 0 is none; DROPPED is a share of the frames. Frames come with the header of virtio, so that the large
ones that a sender leaves to its card to cut stay whole.
"""

import random
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence

ETH_P_ALL = 3
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
LARGEST = 70_000
BUFFER_BYTES = 16 << 20


class Way:
    """One direction.

    Args:
        delay_s: seconds that each takes.
        byte_s: seconds a byte; 0 for no limit.
    """

    def __init__(self, source: socket.socket, target: socket.socket, delay_s: float, byte_s: float) -> None:
        self.source, self._target, self._delay_s, self._byte_s = source, target, delay_s, byte_s
        self._free_at = 0.0
        self._queue: deque[tuple[float, bytes]] = deque()

    def take(self, now: float, dropped: float, draw: random.Random) -> None:
        """Take all frames that have come.

        Args:
            now: seconds.
            dropped: share of them that is lost.
        """
        while True:
            try:
                frame = self.source.recv(LARGEST)
            except BlockingIOError:
                return
            if draw.random() < dropped:
                continue
            self._free_at = max(now, self._free_at) + len(frame) * self._byte_s
            self._queue.append((self._free_at + self._delay_s, frame))

    def give(self, now: float) -> float | None:
        """Send the frames whose time has come, and return that of the next; None if there is none.

        Args:
            now: seconds.
        """
        while self._queue and self._queue[0][0] <= now:
            try:
                self._target.send(self._queue[0][1])
            except BlockingIOError:
                return now + 1e-4
            except OSError:
                pass  # A frame that the port does not take is lost, as on a cable.
            self._queue.popleft()
        return self._queue[0][0] if self._queue else None


def main(words: Sequence[str]) -> None:
    """Carry frames until killed."""
    ports = [_opened(name) for name in words[:2]]
    delay_s, rate, dropped = float(words[2]) / 1e3, float(words[3]) * 1e6 / 8, float(words[4])
    byte_s, draw = 1 / rate if rate else 0.0, random.Random(int(words[5]) if len(words) > 5 else 0)
    ways = [Way(ports[0], ports[1], delay_s, byte_s), Way(ports[1], ports[0], delay_s, byte_s)]
    print("up", flush=True)
    while True:
        due = [at for at in (way.give(time.monotonic()) for way in ways) if at is not None]
        wait_s = max(0.0, min(due) - time.monotonic()) if due else None
        ready, _, _ = select.select(ports, [], [], wait_s)
        for way in ways:
            if way.source in ready:
                way.take(time.monotonic(), dropped, draw)


def _opened(name: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    for option in (SO_RCVBUFFORCE, SO_SNDBUFFORCE):
        port.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    port.bind((name, 0))
    port.setblocking(False)
    return port


if __name__ == "__main__":
    main(sys.argv[1:])
