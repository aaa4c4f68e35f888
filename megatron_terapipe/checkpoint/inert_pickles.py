"""Pickles read without the classes that they name: such objects are inert, and no function is called.

`torch.save` writes pickles, and a pickle may name any function of Python, which is called when it is read. Files of
other trainers name classes of these, which need not be installed. Needs no torch.
"""

import pickle
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar
from zipfile import ZipFile

_MOST_BYTES = 1 << 30
"""Size of the largest pickle that is read, without its tensors."""


class Inert:
    """An object of a class that is not constructed; its contents are dropped."""

    def __init__(self, *args: Any, **keywords: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, item: Any) -> None:
        """Drop an item."""

    add = extend = append


class InertUnpickler(pickle.Unpickler):
    """Unpickler that replaces every class and function but a few by an inert one, also Megatron's."""

    constructed: ClassVar[Mapping[str, Any]] = {
        "argparse.Namespace": Namespace,
        "collections.OrderedDict": OrderedDict,
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or function by its name."""
        return self.constructed.get(f"{module}.{name}", Inert)


class _WithoutTensors(InertUnpickler):
    """The unpickler for a file without its tensors."""

    def persistent_load(self, number: Any) -> Any:
        """Return an inert storage."""
        return Inert()


def load_without_tensors(path: Path) -> Any:
    """Return the objects of a file of `torch.save`; tensors are inert."""
    with ZipFile(path) as archive:
        entry = next(each for each in archive.infolist() if each.filename.endswith("/data.pkl"))
        if entry.file_size > _MOST_BYTES:
            raise ValueError(f"{path.name} has a pickle of {entry.file_size} bytes")
        with archive.open(entry) as pickled:
            return _WithoutTensors(pickled).load()


def pickled(content: Any) -> bytes:
    """Return the pickle of an object."""
    return pickle.dumps(content)
