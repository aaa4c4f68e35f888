"""Files that attack their reader: a pickle that makes a file, in each form that readers of pickles take."""

import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch


class Calls:
    """An object whose pickle calls a function when it is read."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


def poison(path: Path, hit: Path) -> None:
    """Rewrite a file of torch so that reading it makes `hit`, after its content.

    Args:
        path: the file; its objects are unchanged.
        hit: file that is made.
    """
    objects = torch.load(path, map_location="cpu", weights_only=False)
    assert isinstance(objects, dict)
    torch.save({**objects, "more": Calls(Path.touch, hit)}, path)


def hostile_array(path: Path, hit: Path) -> None:
    """Write an `.npy` file of objects, which numpy reads by pickle."""
    np.save(path, np.array([Calls(Path.touch, hit)], dtype=object), allow_pickle=True)


def plain_pickle(path: Path, hit: Path) -> None:
    """Write a pickle as it is, which torch's older format is."""
    path.write_bytes(pickle.dumps(Calls(Path.touch, hit)))


def hostile_zip(path: Path, hit: Path) -> None:
    """Write the archive that torch's newer format is, with that pickle as its objects."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Calls(Path.touch, hit), protocol=2))
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")


def legacy_torch_file(path: Path, hit: Path) -> None:
    """Write the older format of torch."""
    buffer = io.BytesIO()
    torch.save({"weight": torch.zeros(1), "more": Calls(Path.touch, hit)}, buffer, _use_new_zipfile_serialization=False)
    path.write_bytes(buffer.getvalue())
