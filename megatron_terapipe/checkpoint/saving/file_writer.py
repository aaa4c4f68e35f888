"""Writes the files that DeepSpeed saves: at once, or first to memory and later to the disk."""

import io
import os
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from megatron_terapipe.checkpoint.manifest import FileFacts
from megatron_terapipe.checkpoint.saving.durable import DurableFile

_BLOCK = 1 << 26
"""Bytes that are written at a time from memory."""


class FileWriter(CheckpointEngine):
    """DeepSpeed's plug-in that saves one checkpoint's files of this rank.

    A fault is kept and not raised: on the other ranks DeepSpeed would wait for this one.

    Args:
        in_memory: keep the files in memory until `write_kept`. They hold the same bytes.

    Attributes:
        facts: sizes and hashes of the files that are on the disk, by name.
        fault: what kept a file from being written; None if nothing did.
    """

    def __init__(self, *, in_memory: bool) -> None:
        super().__init__()
        self._in_memory = in_memory
        self._kept: list[tuple[Path, io.BytesIO]] = []
        self.facts: dict[str, FileFacts] = {}
        self.fault: str | None = None

    def create(self, info: Any) -> None:
        """Begin: nothing is to do."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a directory.

        Args:
            exist_ok: whether it may be there.
        """
        try:
            os.makedirs(path, exist_ok=exist_ok)
        except OSError as error:
            self._keep_fault(Path(path), error)

    def save(self, state_dict: Any, path: str) -> None:
        """Save a file."""
        if self.fault is not None:
            return
        try:
            if self._in_memory:
                # The bytes of the file are the copy: they are made as fast as tensors are copied.
                buffer = io.BytesIO()
                torch.save(state_dict, buffer)
                self._kept.append((Path(path), buffer))
                return
            with DurableFile(Path(path)) as file:
                torch.save(state_dict, file)
            self.facts[Path(path).name] = file.facts
        except Exception as error:  # Whatever it is, the other ranks must hear of it.
            self._keep_fault(Path(path), error)

    def write_kept(self) -> None:
        """Write what was kept in memory, and give the memory back."""
        while self._kept and self.fault is None:
            path, buffer = self._kept.pop(0)
            try:
                with DurableFile(path) as file, buffer.getbuffer() as content:
                    for start in range(0, len(content), _BLOCK):
                        file.write(content[start : start + _BLOCK])
                self.facts[path.name] = file.facts
            except Exception as error:
                self._keep_fault(path, error)
        self._kept.clear()

    def load(self, path: str, map_location: Any = None) -> Any:
        """Nothing is loaded through it.

        Args:
            map_location: where its tensors would go.
        """
        raise NotImplementedError

    def commit(self, info: Any) -> bool:
        """End: the checkpoint is done when all ranks' files are."""
        return True

    def _keep_fault(self, path: Path, error: Exception) -> None:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
        self.fault = self.fault or f"{path.name}: {reason.splitlines()[0]}"
