"""Counts the bytes of tensors that are alive, made by the code it watches; on any device, CPUs included."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Watches every operation, forward and backward, and follows each storage it makes until nobody holds it.

    Args:
        apart: bytes that are alive and not counted in the peak, such as those of buffers that stand for a host's.

    Attributes:
        now: bytes alive, of storages made since watching began.
        peak: the most there were at once.
    """

    def __init__(self, apart: Callable[[], int] = lambda: 0) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._apart = apart
        self._followed: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        """Run an operation, then follow what it returned."""
        keywords = keywords or {}
        result = function(*arguments, **keywords)
        # A view, or a result in place, is no new memory; parameters are there from before.
        given = {storage._cdata for storage in _storages((arguments, keywords))}
        for storage in _storages(result):
            if storage._cdata not in given:
                self._follow(storage)
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._followed or not size:
            return
        self._followed.add(key)
        self.now += size
        self.peak = max(self.peak, self.now - self._apart())
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._followed.discard(key)
        self.now -= size


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
