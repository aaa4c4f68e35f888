"""A page of memory in which the ranks of one host say that they are there, and how they end.

    local rank 0    rank 4, process 4711, here
    local rank 1    rank 5, process 4712, ending        it has said why

It needs neither a network nor a rank that keeps it, so it tells a death from an orderly end at any time: while packages
are imported, and after the process group is left. It is a file until all ranks of the host have it; then it has no name
any more, and is gone with the last of them.
"""

import mmap
import os
import stat
import struct
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from deepspeed_ext.runtime.liveness.ancestors import Ancestor

_SLOT = struct.Struct("=iii")


class Mark(IntEnum):
    """What a rank says of itself."""

    ABSENT = 0
    """It has not come yet."""

    HERE = 1
    """It runs. If its process is gone, it died."""

    DONE = 2
    """It has done its work."""

    ENDING = 3
    """It ends before its work is done, and the reason is said or known."""


@dataclass(frozen=True, slots=True)
class HostRank:
    """What a rank says of itself."""

    rank: int
    pid: int
    mark: Mark


class HostRanks:
    """The page of the ranks of this host.

    Args:
        path: file of the page, the same for its ranks and nobody else's.

    Raises:
        OSError: if the file is another user's.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._size = path, size
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, stat.S_IRUSR | stat.S_IWUSR)
        try:
            if os.fstat(descriptor).st_uid != os.geteuid():
                raise PermissionError(f"{path} is another user's")
            os.ftruncate(descriptor, size * _SLOT.size)
            self._page = mmap.mmap(descriptor, size * _SLOT.size)
        finally:
            os.close(descriptor)

    def write(self, local_rank: int, rank: HostRank) -> None:
        """Write what a rank says of itself."""
        _SLOT.pack_into(self._page, local_rank * _SLOT.size, rank.rank, rank.pid, rank.mark)

    def read(self) -> dict[int, HostRank]:
        """Return the ranks that have come so far, by their place on the host; the file goes once all have."""
        slots = (_SLOT.unpack_from(self._page, place * _SLOT.size) for place in range(self._size))
        found = {place: HostRank(rank, pid, Mark(mark)) for place, (rank, pid, mark) in enumerate(slots) if mark}
        if len(found) == self._size:
            self.remove_file()
        return found

    def remove_file(self) -> None:
        """Remove the name of the page, so that nothing is left of it."""
        with suppress(OSError):
            self._path.unlink()


def page_of(launcher: Ancestor, size: int, attempt: str) -> HostRanks | None:
    """Return the page of the ranks that a launcher started on this host; None where it cannot be had.

    Args:
        attempt: how often the launcher has started them, with launchers that start ranks again.
    """
    name = f"ranks-of-{os.geteuid()}-{launcher.pid}-{launcher.born:.0f}-{attempt}"
    with suppress(OSError):
        return HostRanks(Path(tempfile.gettempdir()) / name, size)
    return None
