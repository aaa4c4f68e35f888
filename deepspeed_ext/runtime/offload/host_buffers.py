"""Memory of the host for copies of tensors."""

from collections import defaultdict

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor


class HostBuffers:
    """Buffers in the memory of the host, which are used again and again.

    Page-locked where the device is an accelerator: other memory it cannot read while its host does something else.
    Locking pages takes long, so buffers are kept; never more bytes than were in use at once.

    Attributes:
        held: bytes of all buffers.
        in_use: bytes of those that are taken.
        most_in_use: the most that were taken at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._page_locked = device.type != "cpu"
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self.held = self.in_use = self.most_in_use = 0

    def take(self, like: Tensor) -> Tensor:
        """Return a buffer of the shape [...] and type of a tensor, with whatever is in it."""
        size = like.nbytes
        self.in_use += size
        self.most_in_use = max(self.most_in_use, self.in_use)
        buffer = self._free[size].pop() if self._free[size] else self._made(size)
        return buffer.view(like.dtype).view(like.shape)

    def give_back(self, buffer: Tensor) -> None:
        """Let others have a buffer [...] that was taken."""
        self.in_use -= buffer.nbytes
        self._free[buffer.nbytes].append(buffer.reshape(-1).view(torch.uint8))

    def _made(self, size: int) -> Tensor:
        """A new buffer, in place of free ones of other sizes where there would be more than were ever in use."""
        for other, free in self._free.items():
            while free and self.held + size > self.most_in_use:
                free.pop()
                self.held -= other
        self.held += size
        buffer = torch.empty(size, dtype=torch.uint8)
        return get_accelerator().pin_memory(buffer) if self._page_locked else buffer
