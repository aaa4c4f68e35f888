"""Profiles of AMP's repository: measured forward times of each layer of its two models.

AMP (Li et al., "AMP: Automatically Finding Model Parallel Strategies with Heterogeneity Awareness", NeurIPS 2022,
github.com/DachengLi1/AMP) keeps in `src/known_cost` a vector for each model, device and tensor-parallel size: seconds
of the forward of one sequence through each DeepSpeed pipeline layer, on one node, reductions included, with a
synchronisation behind every layer (its `deepspeed/runtime/pipe/module.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from megatron_terapipe.errors import DataError
from megatron_terapipe.search.inputs.layer import Layer

FOLDER = Path("src", "known_cost")
TENSOR_PARALLEL_SIZES = (1, 2, 4)

NUM_LAYERS: Mapping[str, int] = MappingProxyType({"gpt2_G4": 30, "gpt2_P3": 30, "transgan_P3": 56})
"""Pipeline layers of each profile: the model, then the EC2 instances that it was measured on."""

LayerSeconds = tuple[Mapping[int, float], ...]
"""Per layer the seconds of its forward, by tensor-parallel size."""


def read_profile(repository: Path, name: str) -> LayerSeconds:
    """Read a profile for every tensor-parallel size that AMP measured.

    Raises:
        DataError: if a file is missing, cannot be read, or holds anything but one positive time per layer.
    """
    by_size = {
        size: _read(repository / FOLDER / f"{name}_{size}.npy", NUM_LAYERS[name]) for size in TENSOR_PARALLEL_SIZES
    }
    return tuple(
        MappingProxyType({size: seconds[layer] for size, seconds in by_size.items()})
        for layer in range(NUM_LAYERS[name])
    )


def unthrottled(layers: Sequence[Layer], seconds: LayerSeconds) -> Mapping[str, Mapping[int, float]]:
    """Seconds of the forward by layer name and tensor-parallel size; blocks that are alike take what the fastest took.

    The last of the 24 equal blocks took a T4 18 % longer than the first: nothing waits in the profile, so that the
    power limit lowers the clock while it runs. In training the clock recovers in bubbles and reductions. Blocks of a
    V100, which stays below its limit, differ by 3 %.
    """
    fastest: dict[Layer, Mapping[int, float]] = {}
    keys = [replace(layer, name="") if layer.kind == "block" else layer for layer in layers]
    for key, by_size in zip(keys, seconds, strict=True):
        least = fastest.get(key, by_size)
        fastest[key] = {size: min(least[size], each) for size, each in by_size.items()}
    return {layer.name: fastest[key] for layer, key in zip(layers, keys, strict=True)}


def _read(path: Path, num_layers: int) -> list[float]:
    import numpy as np

    if not path.is_file():
        raise DataError(
            f"{path}: there is no such file: give a checkout of AMP's repository, the folder that holds {FOLDER}"
        )
    try:
        times = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: not an array that numpy can read ({error}): check the file out again") from None
    if times.dtype.kind != "f":
        raise DataError(f"{path}: holds {times.dtype}, and times are floating-point numbers: check the file out again")
    if times.shape != (num_layers,):
        raise DataError(
            f"{path}: has shape {times.shape}, and this model has {num_layers} layers, so that it must be "
            f"({num_layers},): check the file out again"
        )
    wrong = np.flatnonzero(~(np.isfinite(times) & (times > 0)))
    if wrong.size:
        raise DataError(
            f"{path}: entry {wrong[0]} is {times[wrong[0]]}, and a time is finite and above 0: check the file out again"
        )
    return [float(time) for time in times]
