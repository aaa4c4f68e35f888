"""Accelerators by name, as their data sheets describe them: dense products, no sparsity, one direction of a link.

Memory is the total that CUDA reports, within 1 %: less than in the name where error correction and the driver take
their share. `half` and `single` are TFLOP/s of dense fp16 or bf16 products with fp32 sums, and of fp32
without TF32, which PyTorch leaves off. Where a data sheet prints figures with sparsity, they are halved here. All data
sheets of devices with products in fp8 have twice the rate of half precision. `watts` is the largest power limit of the
board, of a GH200 with its CPU and both memories. Sources:

    P100       NVIDIA Tesla P100 data sheet (2016)
    V100       NVIDIA V100 data sheet (2020), www.nvidia.com/en-us/data-center/v100
    T4         NVIDIA T4 data sheet (2019), www.nvidia.com/en-us/data-center/tesla-t4
    A10G       NVIDIA A10G data sheet for Amazon EC2 G5 (2022)
    A10, A30   NVIDIA A10 and A30 data sheets (2021)
    A40        NVIDIA A40 data sheet (2021)
    L4, L40S   NVIDIA L4, L40 and L40S data sheets (2022 and 2023), www.nvidia.com/en-us/data-center/l4 and .../l40s
    A100       NVIDIA A100 data sheet (nvidia-a100-datasheet-us-nvidia-1758950-r4, 2021)
    H100       NVIDIA H100 data sheet (2023), www.nvidia.com/en-us/data-center/h100
    A800       as the A100, with 400 GB/s of NVLink in place of 600
    H800       as the H100, with 400 GB/s of NVLink in place of 900
    H200       NVIDIA H200 data sheet (2024), www.nvidia.com/en-us/data-center/h200
    GH200      NVIDIA GH200 Grace Hopper Superchip data sheet (2023)
    B200       NVIDIA DGX B200 data sheet (2024): an eighth of the system's figures
    GB200      NVIDIA GB200 NVL72 data sheet (2024): half of a superchip's figures
    RTX 20     NVIDIA Turing GPU Architecture whitepaper WP-09183 (2018), appendices A to C, reference clocks
    RTX 30     NVIDIA Ampere GA102 GPU Architecture whitepaper (2020), table 2
    RTX 40     NVIDIA Ada GPU Architecture whitepaper (2022), appendix A
    MI250X     AMD Instinct MI250X data sheet (2021): half of it, because its two dies are two devices in PyTorch
    MI300X     AMD Instinct MI300X data sheet (2023)
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

MIB = 2**20

GUESS = "a guess"
"""Source of figures that have none."""

GENERATIONS: Mapping[str, str] = MappingProxyType(
    {
        "P100": "pascal",
        "V100": "volta",
        "T4": "turing",
        "RTX 20": "turing",
        "A10G": "ampere",
        "A10, A30": "ampere",
        "A40": "ampere",
        "A100": "ampere",
        "A800": "ampere",
        "RTX 30": "ampere",
        "L4, L40S": "ada",
        "RTX 40": "ada",
        "H100": "hopper",
        "H800": "hopper",
        "H200": "hopper",
        "GH200": "hopper",
        "B200": "blackwell",
        "GB200": "blackwell",
        "MI250X": "cdna2",
        "MI300X": "cdna3",
        GUESS: "cpu",
    }
)
"""Architecture of the devices of each row of the list above, which decides how well kernels run."""

WITH_FP8 = ("ada", "hopper", "blackwell", "cdna3")
"""Architectures with matrix products in fp8."""

GENERATION_NAMES = tuple(dict.fromkeys(GENERATIONS.values()))
"""All architectures."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One accelerator, or the cores of one rank on a CPU."""

    name: str
    """Name in the device library, or the user's."""
    memory_bytes: float
    memory_bandwidth: float
    """Bytes per second."""
    half_flops: float
    """FLOP/s of dense fp16 or bf16 matrix products, by the data sheet."""
    single_flops: float
    """FLOP/s of dense fp32 products, likewise."""
    is_gpu: bool = True
    """Whether a host launches its kernels."""
    generation: str = ""
    """Architecture, in `GENERATIONS`; empty = not known."""

    def has_products(self, precision: str) -> bool:
        """Whether it multiplies matrices in a precision."""
        return precision != "fp8" or self.generation in WITH_FP8

    def peak_flops(self, precision: str) -> float:
        """FLOP/s of matrix products in `fp16`, `bf16`, `fp32`, or `fp8` (`WITH_FP8`)."""
        return self.single_flops if precision == "fp32" else self.half_flops * (2 if precision == "fp8" else 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class LibraryDevice:
    """A device, its other names, and the machine it is usually in."""

    device: Device
    """Figures of the data sheet."""
    source: str
    """Row of the list above."""
    machine: str
    """Name of the machine with the default links of a cluster."""
    aliases: tuple[str, ...]
    """Other names, such as names in published measurements."""
    power_w: float | None
    """Largest power limit of the board; None = not known."""


def _entry(
    name: str,
    source: str,
    machine: str,
    *aliases: str,
    memory_mib: int,
    memory_gb_per_s: float,
    half: float,
    single: float,
    watts: float | None = None,
    is_gpu: bool = True,
) -> LibraryDevice:
    device = Device(
        name=name,
        memory_bytes=float(memory_mib * MIB),
        memory_bandwidth=memory_gb_per_s * 1e9,
        half_flops=half * 1e12,
        single_flops=single * 1e12,
        is_gpu=is_gpu,
        generation=GENERATIONS[source],
    )
    return LibraryDevice(device=device, source=source, machine=machine, aliases=aliases, power_w=watts)


_ENTRIES = (
    _entry("P100-SXM2-16GB", "P100", "dgx-1-p100", "P100", "P100-16GB", "Tesla-P100",
           memory_mib=16276, memory_gb_per_s=732, half=21.2, single=10.6, watts=300),
    _entry("V100-SXM2-16GB", "V100", "p3.16xlarge", "V100", "V100-16GB", "V100-SXM2", "Tesla-V100",
           memory_mib=16160, memory_gb_per_s=900, half=125, single=15.7, watts=300),
    _entry("V100-SXM2-32GB", "V100", "p3dn.24xlarge", "V100-32GB", "V100-SXM3-32GB",
           memory_mib=32510, memory_gb_per_s=900, half=125, single=15.7, watts=300),
    _entry("V100-PCIe-16GB", "V100", "pcie-3", "V100-PCIe",
           memory_mib=16160, memory_gb_per_s=900, half=112, single=14.0, watts=250),
    _entry("V100-PCIe-32GB", "V100", "pcie-3",
           memory_mib=32510, memory_gb_per_s=900, half=112, single=14.0, watts=250),
    _entry("V100S-PCIe-32GB", "V100", "pcie-3", "V100S",
           memory_mib=32510, memory_gb_per_s=1134, half=130, single=16.4, watts=250),
    _entry("T4", "T4", "g4dn.12xlarge", "T4-16GB", "Tesla-T4",
           memory_mib=15109, memory_gb_per_s=320, half=65, single=8.1, watts=70),
    _entry("RTX-2080", "RTX 20", "pcie-3", "GeForce-RTX-2080", "RTX2080",
           memory_mib=7982, memory_gb_per_s=448, half=40.3, single=10.1, watts=215),
    _entry("RTX-2080-Ti", "RTX 20", "pcie-3", "GeForce-RTX-2080-Ti", "RTX2080Ti",
           memory_mib=11019, memory_gb_per_s=616, half=53.8, single=13.4, watts=250),
    # The only Turing of these with sums in fp32 at full speed in its tensor cores.
    _entry("Titan-RTX", "RTX 20", "pcie-3", "TitanRTX",
           memory_mib=24220, memory_gb_per_s=672, half=130.5, single=16.3, watts=280),
    _entry("A100-SXM4-40GB", "A100", "p4d.24xlarge", "A100-40GB", "A100-40", "A100-SXM-40GB",
           memory_mib=40536, memory_gb_per_s=1555, half=312, single=19.5, watts=400),
    _entry("A100-SXM4-80GB", "A100", "dgx-a100", "A100", "A100-SXM4", "A100-80GB", "A100-80", "A100-SXM",
           memory_mib=81251, memory_gb_per_s=2039, half=312, single=19.5, watts=400),
    _entry("A100-PCIe-40GB", "A100", "pcie-4", "A100-PCIe-40",
           memory_mib=40536, memory_gb_per_s=1555, half=312, single=19.5, watts=250),
    _entry("A100-PCIe-80GB", "A100", "pcie-4", "A100-PCIe", "A100-PCIe-80",
           memory_mib=81251, memory_gb_per_s=1935, half=312, single=19.5, watts=300),
    _entry("A800-SXM4-80GB", "A800", "octo-a800", "A800",
           memory_mib=81251, memory_gb_per_s=2039, half=312, single=19.5, watts=400),
    _entry("A10", "A10, A30", "pcie-4", "A10-24GB",
           memory_mib=22731, memory_gb_per_s=600, half=125, single=31.2, watts=150),
    _entry("A10G", "A10G", "g5.48xlarge", "A10G-24GB",
           memory_mib=22731, memory_gb_per_s=600, half=70, single=35, watts=300),
    _entry("A30", "A10, A30", "pcie-4", "A30-24GB",
           memory_mib=24062, memory_gb_per_s=933, half=165, single=10.3, watts=165),
    _entry("A40", "A40", "pcie-4", "A40-48GB",
           memory_mib=45634, memory_gb_per_s=696, half=149.7, single=37.4, watts=300),
    _entry("RTX-3090", "RTX 30", "pcie-4", "GeForce-RTX-3090", "RTX3090",
           memory_mib=24268, memory_gb_per_s=936, half=71, single=35.6, watts=350),
    _entry("RTX-4090", "RTX 40", "pcie-4", "GeForce-RTX-4090", "RTX4090",
           memory_mib=24217, memory_gb_per_s=1008, half=165.2, single=82.6, watts=450),
    _entry("L4", "L4, L40S", "g6.48xlarge", "L4-24GB",
           memory_mib=22700, memory_gb_per_s=300, half=121, single=30.3, watts=72),
    _entry("L40", "L4, L40S", "pcie-4", "L40-48GB",
           memory_mib=45776, memory_gb_per_s=864, half=181, single=90.5, watts=300),
    _entry("L40S", "L4, L40S", "g6e.48xlarge", "L40S-48GB",
           memory_mib=45776, memory_gb_per_s=864, half=362, single=91.6, watts=350),
    _entry("H100-SXM5-80GB", "H100", "dgx-h100", "H100", "H100-SXM", "H100-SXM5", "H100-80GB", "H100-80GB-HBM3",
           memory_mib=81090, memory_gb_per_s=3350, half=989.4, single=67, watts=700),
    _entry("H100-PCIe-80GB", "H100", "pcie-5", "H100-PCIe",
           memory_mib=81090, memory_gb_per_s=2000, half=756, single=51, watts=350),
    _entry("H100-NVL-94GB", "H100", "pcie-5", "H100-NVL",
           memory_mib=95830, memory_gb_per_s=3900, half=835.5, single=60, watts=400),
    _entry("H800-SXM5-80GB", "H800", "octo-h800", "H800",
           memory_mib=81090, memory_gb_per_s=3350, half=989.4, single=67, watts=700),
    _entry("H200-SXM5-141GB", "H200", "dgx-h200", "H200", "H200-SXM", "H200-SXM5", "H200-141GB",
           memory_mib=143167, memory_gb_per_s=4800, half=989.4, single=67, watts=700),
    _entry("H200-NVL-141GB", "H200", "pcie-5", "H200-NVL",
           memory_mib=143167, memory_gb_per_s=4800, half=835.5, single=60, watts=600),
    _entry("GH200-96GB", "GH200", "quad-gh200", "GH200", "GH200-480GB",
           memory_mib=96768, memory_gb_per_s=4000, half=989.4, single=67, watts=1000),
    _entry("GH200-144GB", "GH200", "quad-gh200",
           memory_mib=146000, memory_gb_per_s=4900, half=989.4, single=67, watts=1000),
    _entry("B200-SXM-180GB", "B200", "dgx-b200", "B200", "B200-SXM", "B200-180GB", "B200-192GB",
           memory_mib=182642, memory_gb_per_s=8000, half=2250, single=75, watts=1000),
    _entry("GB200-186GB", "GB200", "quad-gb200", "GB200",
           memory_mib=189471, memory_gb_per_s=8000, half=2500, single=80, watts=1200),
    _entry("MI250X-die", "MI250X", "quad-mi250x", "MI250X", "MI250X-GCD", "MI250X-64GB",
           memory_mib=65520, memory_gb_per_s=1638, half=191.5, single=47.9, watts=280),
    _entry("MI300X", "MI300X", "octo-mi300x", "MI300X-192GB",
           memory_mib=196592, memory_gb_per_s=5300, half=1307.4, single=163.4, watts=750),
    # No data sheet: a guess, so that a CPU can be searched before it is measured with `search measure`.
    _entry("cpu-core", GUESS, "cpu", "CPU",
           memory_mib=8192, memory_gb_per_s=10, half=0.03, single=0.03, is_gpu=False),
)  # fmt: skip

DEVICES: Mapping[str, LibraryDevice] = MappingProxyType({each.device.name: each for each in _ENTRIES})
"""Every device by its name."""

OTHER_PRODUCTS = {"ti", "super", "d", "laptop", "mobile", "max", "mig"}
"""Words after the name of a device that make it another one."""


def device_in(name: str) -> Device | None:
    """Return the device of the table with the longest name that has all its words in `name`; None if there is none.

    Args:
        name: name that the driver prints, such as `NVIDIA A100 80GB PCIe`.
    """
    words = name_words(name)
    found: dict[int, Device] = {}
    for entry in DEVICES.values():
        for spelling in (entry.device.name, *entry.aliases):
            if name_words(spelling) <= words and not (words - name_words(spelling)) & OTHER_PRODUCTS:
                found.setdefault(len(spelling), entry.device)
    return found[max(found)] if found else None


def name_words(name: str) -> set[str]:
    """Return the words of a name in lower case."""
    return set(re.split(r"[\s/_-]+", name.lower()))
