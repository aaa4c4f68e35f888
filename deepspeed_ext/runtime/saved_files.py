"""Safe reading of the files of a checkpoint; and the weights of all pipeline ranks for one file.

`torch.save` writes pickles, and a pickle may name any function of Python, which is called when the file is read. torch
can refuse all but tensors, plain values and listed classes (`weights_only`), which DeepSpeed 0.19.8 turns off.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor, _weights_only_unpickler

from deepspeed_ext.plan.errors import UserError

ALLOWED = (DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address)
"""The classes in DeepSpeed's files. Their construction has no side effects."""


def _member(kind: object, name: str) -> Enum:
    """Return the member of a class of `ALLOWED`; some releases of Python (3.11.0 to 3.11.3) save one as a `getattr`."""
    if not (isinstance(kind, type) and issubclass(kind, Enum) and kind in ALLOWED and name in kind.__members__):
        raise UnpicklingError("callable getattr is not allowed")
    return kind[name]


_NAMED = (*ALLOWED, (_member, "builtins.getattr"), (_member, "__builtin__.getattr"))
"""Names that files may contain: classes, and functions that replace others by name."""

_FORCED, _FORBIDDEN = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
"""Variables by which torch overrides the argument of its caller; both at once are an error."""

_OTHERS = re.compile(r"builtins\.bytearray|torch\._utils\._rebuild_(sparse|meta|nested|qtensor|wrapper|device)\w*")
"""Functions of torch that make other tensors, which no run saves, or take memory by a number in the file."""

_REFUSED = re.compile(r"GLOBAL (\S+) was not an allowed global|callable (\S+) |pickle from module (\S+)")


class UnsafeFileError(UserError):
    """A file with names of functions or classes that could run a program as it is read."""


@contextmanager
def _plain_objects() -> Iterator[None]:
    """Let torch read dense tensors, plain values and the listed classes, and no others that it allows itself."""
    allowed = _weights_only_unpickler._get_allowed_globals()
    others = {name: allowed.pop(name) for name in list(allowed) if _OTHERS.fullmatch(name)}
    try:
        with torch.serialization.safe_globals(list(_NAMED)):
            yield
    finally:
        allowed.update(others)


def load_saved(path: Path) -> Any:
    """Return the objects of a file. Tensors are mapped into memory, and read when they are used."""
    try:
        with _plain_objects():
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except UnpicklingError as error:
        raise _unsafe(str(path), error) from None


@contextmanager
def only_safe_files(directory: Path) -> Iterator[None]:
    """Let DeepSpeed read the files of a checkpoint safely, too, against its arguments of torch."""
    before = {name: os.environ.pop(name, None) for name in (_FORCED, _FORBIDDEN)}
    os.environ[_FORCED] = "1"
    try:
        with _plain_objects():
            yield
    except UnpicklingError as error:
        raise UnsafeFileError(
            f"{_unsafe(f'a file of {directory}', error)}; classes of your own in client_state are allowed by "
            "torch.serialization.add_safe_globals"
        ) from None
    finally:
        del os.environ[_FORCED]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def _unsafe(file: str, error: UnpicklingError) -> UnsafeFileError:
    """The error, with the function or class that torch names."""
    found = _REFUSED.search(str(error))
    name = next(filter(None, found.groups())) if found else "an object that is neither a tensor nor a plain value"
    fault = "makes no plain tensor" if _OTHERS.fullmatch(name) else "could run a program, and did not"
    return UnsafeFileError(f"{file} names {name}, which {fault}: load a checkpoint of a source that you trust")


def gathered_by_first_rank(engine: Any, own: dict[str, Tensor]) -> dict[str, Tensor] | None:
    """Tensors [...] of all pipeline ranks, by name, on the CPU of rank 0; None on other ranks. Every rank must call it.

    If several ranks have a name, the first one's tensor is taken.
    """
    if engine.grid.get_data_parallel_rank() > 0:
        return None
    group, first = engine.grid.get_pipe_parallel_group(), engine.grid.stage_to_global(0)
    on_cpu = {name: value.detach().cpu() if torch.is_tensor(value) else value for name, value in own.items()}
    parts: list[Any] | None = None
    if engine.global_rank == first:
        parts = [None] * dist.get_world_size(group)
    dist.gather_object(on_cpu, parts, dst=first, group=group)
    if parts is None:
        return None
    return {name: value for part in reversed(parts) for name, value in part.items()}
