"""Checkpoints that are written while training goes on, one at a time."""

from datetime import timedelta
from threading import Thread

import torch
import torch.distributed as dist

from megatron_terapipe.checkpoint.saving.save import UnfinishedSave

_LONGEST_WRITE = timedelta(days=1)
"""Time that a rank waits for the others' files. A rank that ends is noticed at once, and one that hangs by training."""


class BackgroundSaves:
    """Finishes a checkpoint in a thread of each rank; every rank must call each method at the same time.

    The threads agree in a process group of their own, over the network of the hosts, so that no message of training
    waits for them. What they do releases Python's lock: it hashes, writes and syncs bytes.

    Args:
        device: on which ranks ask each other between two steps.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._group = dist.new_group(backend="gloo", timeout=_LONGEST_WRITE)
        self._thread: Thread | None = None
        self._lines: list[str] = []
        self._error: Exception | None = None

    def start(self, unfinished: UnfinishedSave) -> None:
        """Finish a checkpoint in the background; there must be none in flight."""
        assert self._thread is None, "one at a time"
        self._lines, self._error = [], None
        # A run that fails for another reason does not wait for it: the checkpoint before stays the latest.
        self._thread = Thread(target=self._run, args=(unfinished,), name="checkpoint", daemon=True)
        self._thread.start()

    def is_done(self) -> bool:
        """Whether there is a checkpoint in flight that all ranks are done with. While one is, this asks all ranks."""
        if self._thread is None:
            return False
        done = torch.tensor(not self._thread.is_alive(), dtype=torch.int32, device=self._device)
        dist.all_reduce(done, op=dist.ReduceOp.MIN)
        return bool(done.item())

    def finish(self) -> list[str]:
        """Wait for the checkpoint in flight, if there is one; return lines for the log.

        Raises:
            SaveError: on every rank alike, if it could not be saved.
        """
        if self._thread is None:
            return []
        self._thread.join()
        self._thread = None
        if self._error is not None:
            raise self._error
        return self._lines

    def _run(self, unfinished: UnfinishedSave) -> None:
        try:
            self._lines = unfinished.finish(self._group)
        except Exception as error:  # Raised where training can end.
            self._error = error
