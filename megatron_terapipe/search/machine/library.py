"""Devices and machines by the names that people give them."""

import re
from collections.abc import Mapping
from types import MappingProxyType

from megatron_terapipe.devices import DEVICES, GUESS, Device, LibraryDevice
from megatron_terapipe.errors import ConfigError
from megatron_terapipe.search.machine.cluster import HostMemory, Link, Node
from megatron_terapipe.search.machine.documents import suggestion

# Machines by name: how many devices of which kind, and the links inside and between them, one direction.
#
# Bandwidths are from data sheets: an NVLink generation by its links per device, PCIe by lanes, network cards by
# their line rate. Latencies are what NCCL assumes for rings of its Simple protocol: 3.4 us over NVLink, 5.7 us
# over PCIe, 14 us over a network (github.com/NVIDIA/nccl, src/graph/tuning.cc, `hwLat`); Ethernet without remote memory
# access is given 30 us, a round guess. The host's memory is of the whole node in 10^9 bytes; each device reaches
# it over its own 16 lanes of PCIe, or over NVLink-C2C or Infinity Fabric. The reached share of all this is in
# `price.efficiency`.

NVLINK_AND_CARDS = (0.9e-6, 14e-6)
"""Seconds of an empty message inside a node, and between nodes."""
NVLINK_AND_ETHERNET = (0.9e-6, 30e-6)
PCIE_AND_ETHERNET = (5.7e-6, 30e-6)
PROCESSES = (20e-6, 30e-6)
"""Between processes of one CPU, over sockets."""

GIGABYTE = 1e9
GIGABIT = 1e9 / 8


def _machine(
    name: str,
    device: str,
    num_devices: int,
    inside_gb_per_s: float,
    cards: tuple[int, float],
    host: tuple[float, float],
    latencies_s: tuple[float, float] = NVLINK_AND_CARDS,
) -> Node:
    """Return a machine with cards of so many Gbit/s, and a host of so many GB, with as many GB/s to each device."""
    (num_cards, card_gbit_per_s), (host_gb, host_gb_per_s) = cards, host
    return Node(
        name=name,
        device=DEVICES[device].device,
        num_devices=num_devices,
        inside=Link(bandwidth=inside_gb_per_s * GIGABYTE, latency_s=latencies_s[0]),
        network=Link(bandwidth=card_gbit_per_s * GIGABIT, latency_s=latencies_s[1]),
        num_network_cards=num_cards,
        host=HostMemory(memory_bytes=host_gb * GIGABYTE, bandwidth=host_gb_per_s * GIGABYTE),
    )


_ENTRIES = (
    # Amazon EC2 instance types, aws.amazon.com/ec2/instance-types: devices, network, memory.
    _machine("p3.2xlarge", "V100-SXM2-16GB", 1, 150, (1, 10), (65, 16), NVLINK_AND_ETHERNET),
    _machine("p3.8xlarge", "V100-SXM2-16GB", 4, 150, (1, 10), (262, 16), NVLINK_AND_ETHERNET),
    _machine("p3.16xlarge", "V100-SXM2-16GB", 8, 150, (1, 25), (524, 16), NVLINK_AND_ETHERNET),
    _machine("p3dn.24xlarge", "V100-SXM2-32GB", 8, 150, (1, 100), (825, 16), NVLINK_AND_ETHERNET),
    _machine("p4d.24xlarge", "A100-SXM4-40GB", 8, 300, (4, 100), (1237, 32)),
    _machine("p4de.24xlarge", "A100-SXM4-80GB", 8, 300, (4, 100), (1237, 32)),
    _machine("p5.48xlarge", "H100-SXM5-80GB", 8, 450, (32, 100), (2199, 64)),
    _machine("p5en.48xlarge", "H200-SXM5-141GB", 8, 450, (16, 200), (2199, 64)),
    _machine("p6-b200.48xlarge", "B200-SXM-180GB", 8, 900, (8, 400), (2199, 64)),
    _machine("g4dn.12xlarge", "T4", 4, 16, (1, 50), (206, 16), PCIE_AND_ETHERNET),
    _machine("g4dn.metal", "T4", 8, 16, (1, 100), (412, 16), PCIE_AND_ETHERNET),
    _machine("g5.12xlarge", "A10G", 4, 32, (1, 40), (206, 32), PCIE_AND_ETHERNET),
    _machine("g5.48xlarge", "A10G", 8, 32, (1, 100), (825, 32), PCIE_AND_ETHERNET),
    _machine("g6.48xlarge", "L4", 8, 32, (1, 100), (825, 32), PCIE_AND_ETHERNET),
    _machine("g6e.48xlarge", "L40S", 8, 32, (1, 400), (1649, 32), PCIE_AND_ETHERNET),
    # Data sheets of NVIDIA DGX-1, DGX A100, H100, H200, B200, B300; octo: the same with the NVLink of A800, H800.
    _machine("dgx-1-p100", "P100-SXM2-16GB", 8, 80, (4, 100), (512, 16)),
    _machine("dgx-1-v100", "V100-SXM2-32GB", 8, 150, (4, 100), (512, 16)),
    _machine("dgx-a100", "A100-SXM4-80GB", 8, 300, (8, 200), (2000, 32)),
    _machine("octo-a800", "A800-SXM4-80GB", 8, 200, (8, 200), (2000, 32)),
    _machine("octo-h800", "H800-SXM5-80GB", 8, 200, (8, 400), (2000, 64)),
    _machine("dgx-h100", "H100-SXM5-80GB", 8, 450, (8, 400), (2000, 64)),
    _machine("dgx-h200", "H200-SXM5-141GB", 8, 450, (8, 400), (2000, 64)),
    _machine("dgx-b200", "B200-SXM-180GB", 8, 900, (8, 400), (2000, 64)),
    _machine("dgx-b300", "B300-SXM-270GB", 8, 900, (8, 800), (2000, 128)),
    # Four superchips with NVLink to each other and a 200 Gbit/s card each, as in CSCS's Alps (docs.cscs.ch).
    # A superchip's 18 links of 25 GB/s go to three others, six to each.
    _machine("quad-gh200", "GH200-96GB", 4, 150, (4, 200), (480, 450)),
    # A compute tray of the GB200 or GB300 NVL72: NVLink to all, a card of 400 or 800 Gbit/s for each device.
    _machine("quad-gb200", "GB200-186GB", 4, 900, (4, 400), (960, 450)),
    _machine("quad-gb300", "GB300-278GB", 4, 900, (4, 800), (960, 450)),
    # AMD Instinct data sheets: Infinity Fabric links between devices; a card of 200 and 400 Gbit/s as in
    # Frontier (docs.olcf.ornl.gov) and in Azure's ND MI300X v5.
    _machine("quad-mi250x", "MI250X-die", 8, 50, (4, 200), (512, 36)),
    _machine("octo-mi300x", "MI300X", 8, 448, (8, 400), (1986, 64)),
    # 16 lanes of PCIe 3, 4 and 5, eight devices, one network card of 100 Gbit/s: a usual server, not a product.
    _machine("pcie-3", "cpu-core", 8, 16, (1, 100), (512, 16), PCIE_AND_ETHERNET),
    _machine("pcie-4", "cpu-core", 8, 32, (1, 100), (512, 32), PCIE_AND_ETHERNET),
    _machine("pcie-5", "cpu-core", 8, 64, (1, 100), (1024, 64), PCIE_AND_ETHERNET),
    # A guess: processes of one CPU talk over its memory, machines over 1 Gbit/s.
    _machine("cpu", "cpu-core", 2, 2, (1, 1), (16, 8), PROCESSES),
)  # fmt: skip

MACHINES: Mapping[str, Node] = MappingProxyType({each.name: each for each in _ENTRIES})
"""Every machine by its name: one node of it."""

FOR_ANY_DEVICE = ("pcie-3", "pcie-4", "pcie-5")
"""Machines whose device must be named."""


def device(name: str, where: str = "device") -> Device:
    """Return a device by its name, or another name of it.

    Upper and lower case, blanks, `-`, `_` and a leading NVIDIA, AMD or Tesla make no difference.
    """
    if (entry := find_device(name)) is not None:
        return entry.device
    remedy = suggestion(name, [each for entry in DEVICES.values() for each in (entry.device.name, *entry.aliases)])
    if not remedy.startswith("did you mean"):
        remedy = f"choose among {', '.join(DEVICES)}"
    raise ConfigError(f"{where} {name!r} is not in the device library: {remedy}, or describe it by its fields")


def find_device(name: str) -> LibraryDevice | None:
    """Return a device with its source and its usual machine; None if the library does not have it. See `device`."""
    key = _key(name)
    return next((each for each in DEVICES.values() if key in map(_key, (each.device.name, *each.aliases))), None)


def names_one_device(name: str, other: str) -> bool:
    """Whether two names are of one device; names outside of the library are compared as spelled."""
    first, second = find_device(name), find_device(other)
    return _key(name) == _key(other) if first is None else first is second


def machine(name: str, where: str = "machine") -> Node:
    """Return a machine by its name."""
    by_key = {_key(each): each for each in MACHINES}
    if _key(name) in by_key:
        return MACHINES[by_key[_key(name)]]
    raise ConfigError(f"{where} {name!r} is not in the library of machines: {suggestion(name, MACHINES)}")


def usual_machine(name: str) -> Node:
    """Return the machine with the default links of a device."""
    entry = find_device(name)
    return MACHINES["pcie-4" if entry is None else entry.machine]


def needs_fp16(name: str) -> bool:
    """Whether the tensor cores of a device have fp16 and no bf16: those before Ampere."""
    entry = find_device(name)
    return entry is not None and entry.source in ("P100", "V100", "T4", "RTX 20")


def smallest_device_with(memory_bytes: float) -> Device | None:
    """Return the accelerator of the library with the least memory that is enough; None if none has as much."""
    large = (each.device for each in DEVICES.values() if each.device.is_gpu)
    enough = (each for each in large if each.memory_bytes >= memory_bytes)
    return min(enough, key=lambda each: each.memory_bytes, default=None)


def is_guess(name: str) -> bool:
    """Whether the figures of a device are from no data sheet."""
    return name in DEVICES and DEVICES[name].source == GUESS


def _key(name: str) -> str:
    plain = re.sub(r"[\s_-]+", "", name).lower()
    return re.sub(r"^(nvidia|amdinstinct|amd)?(tesla|geforce)?", "", plain)
