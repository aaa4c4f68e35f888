"""Devices and machines by the names that people give them."""

import re

from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.cluster.devices import DEVICES, GUESS, LibraryDevice
from megatron_terapipe.search.cluster.machine import Device
from megatron_terapipe.search.cluster.machines import MACHINES, Machine
from megatron_terapipe.search.reading import suggestion


def device(name: str, where: str = "device") -> Device:
    """Return a device by its name, or another name of it.

    Upper and lower case, blanks, `-`, `_` and a leading NVIDIA, AMD or Tesla make no difference.

    Args:
        name: such as `A100-SXM4-80GB`, or as `nvidia-smi` prints it.
        where: what named it, for the error.

    Raises:
        ConfigError: if there is none of that name.
    """
    return library_device(name, where).device


def library_device(name: str, where: str = "device") -> LibraryDevice:
    """Return a device with its source and its usual machine; see `device`."""
    key = _key(name)
    for entry in DEVICES.values():
        if key in map(_key, (entry.device.name, *entry.aliases)):
            return entry
    every = [spelling for entry in DEVICES.values() for spelling in (entry.device.name, *entry.aliases)]
    remedy = suggestion(name, every)
    if not remedy.startswith("did you mean"):
        remedy = f"choose among {', '.join(DEVICES)}"
    raise ConfigError(f"{where} {name!r} is not in the device library: {remedy}, or describe it by its fields")


def machine(name: str, where: str = "machine") -> Machine:
    """Return a machine by its name.

    Raises:
        ConfigError: if there is none of that name.
    """
    by_key = {_key(each): each for each in MACHINES}
    if _key(name) in by_key:
        return MACHINES[by_key[_key(name)]]
    raise ConfigError(f"{where} {name!r} is not in the library of machines: {suggestion(name, MACHINES)}")


def usual_machine(name: str) -> Machine:
    """The machine whose links a device is given where nobody says any.

    Args:
        name: of the device; one that the library does not know gets PCIe 4.
    """
    try:
        return MACHINES[library_device(name).machine]
    except ConfigError:
        return MACHINES["pcie-4"]


def needs_fp16(name: str) -> bool:
    """Whether a device's tensor cores know fp16 and no bf16: those before Ampere."""
    try:
        return library_device(name).source in ("P100", "V100", "T4", "RTX 20")
    except ConfigError:
        return False


def is_guess(name: str) -> bool:
    """Whether the figures of a device are nobody's data sheet."""
    return name in DEVICES and DEVICES[name].source == GUESS


def _key(name: str) -> str:
    plain = re.sub(r"[\s_-]+", "", name).lower()
    return re.sub(r"^(nvidia|amdinstinct|amd)?(tesla|geforce)?", "", plain)
