"""Accelerators by name, as their data sheets describe them: dense products, no sparsity, one direction of a link.

Memory is the total that CUDA reports, within 1 %: less than in the name where error correction and the driver take
their share. `half` and `single` are TFLOP/s of dense fp16 or bf16 products with fp32 sums, and of fp32
without TF32, which PyTorch leaves off. Where a data sheet prints figures with sparsity, they are halved here. All data
sheets of devices with products in fp8 have twice the rate of half precision. Sources:

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
    B300       NVIDIA Blackwell Ultra data sheet (2025): B300, an eighth of the system's figures, and GB300
    RTX 20     NVIDIA Turing GPU Architecture whitepaper WP-09183 (2018), appendices A to C, reference clocks
    RTX 30     NVIDIA Ampere GA102 GPU Architecture whitepaper (2020), table 2
    RTX 40     NVIDIA Ada GPU Architecture whitepaper (2022), appendix A
    MI250X     AMD Instinct MI250X data sheet (2021): half of it, because its two dies are two devices in PyTorch
    MI300X     AMD Instinct MI300X data sheet (2023)
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

MIB = 2**20

GUESS = "a guess"
"""Source of figures that have none."""

GENERATIONS: Mapping[str, str] = {
    source: generation
    for generation, sources in (
        ("pascal", ("P100",)),
        ("volta", ("V100",)),
        ("turing", ("T4", "RTX 20")),
        ("ampere", ("A10G", "A10, A30", "A40", "A100", "A800", "RTX 30")),
        ("ada", ("L4, L40S", "RTX 40")),
        ("hopper", ("H100", "H800", "H200", "GH200")),
        ("blackwell", ("B200", "GB200", "B300")),
        ("cdna2", ("MI250X",)),
        ("cdna3", ("MI300X",)),
        ("cpu", (GUESS,)),
    )
    for source in sources
}
"""Architecture of the devices of each row of the list above, which decides how well kernels run."""

EIGHT_BITS: Mapping[str, tuple[str, ...]] = {"fp8": ("ada", "hopper", "blackwell", "cdna3"), "mxfp8": ("blackwell",)}
"""Formats of 8 bits, with one scale for a tensor and with one for each 32 numbers, and the architectures with matrix
products in them, at twice the rate of half precision."""

GENERATION_NAMES = tuple(dict.fromkeys(GENERATIONS.values()))


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
        return precision not in EIGHT_BITS or self.generation in EIGHT_BITS[precision]

    def peak_flops(self, precision: str) -> float:
        """FLOP/s of matrix products in `fp16`, `bf16`, `fp32`, or one of `EIGHT_BITS`."""
        return self.single_flops if precision == "fp32" else self.half_flops * (2 if precision in EIGHT_BITS else 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class LibraryDevice:
    """A device, its other names, and the machine it is usually in."""

    device: Device
    source: str
    """Row of the list above."""
    machine: str
    """Name of the machine with the default links of a cluster."""
    aliases: tuple[str, ...]
    """Other names, such as names in published measurements."""


_Row = tuple[str, str, str, int, float, float, float, str]

_ROWS: tuple[_Row, ...] = (
    # Name, source, usual machine, MiB, GB/s, TFLOP/s in half and in single precision, other names.
    ("P100-SXM2-16GB",  "P100",     "dgx-1-p100",     16276,  732,   21.2,  10.6, "P100 P100-16GB Tesla-P100"),
    ("V100-SXM2-16GB",  "V100",     "p3.16xlarge",    16160,  900,    125,  15.7,
     "V100 V100-16GB V100-SXM2 Tesla-V100"),
    ("V100-SXM2-32GB",  "V100",     "p3dn.24xlarge",  32510,  900,    125,  15.7, "V100-32GB V100-SXM3-32GB"),
    ("V100-PCIe-16GB",  "V100",     "pcie-3",         16160,  900,    112,    14, "V100-PCIe"),
    ("V100-PCIe-32GB",  "V100",     "pcie-3",         32510,  900,    112,    14, ""),
    ("V100S-PCIe-32GB", "V100",     "pcie-3",         32510, 1134,    130,  16.4, "V100S"),
    ("T4",              "T4",       "g4dn.12xlarge",  15109,  320,     65,   8.1, "T4-16GB Tesla-T4"),
    ("RTX-2080",        "RTX 20",   "pcie-3",          7982,  448,   40.3,  10.1, "GeForce-RTX-2080 RTX2080"),
    ("RTX-2080-Ti",     "RTX 20",   "pcie-3",         11019,  616,   53.8,  13.4,
     "GeForce-RTX-2080-Ti RTX2080Ti"),
    # The only Turing of these with sums in fp32 at full speed in its tensor cores.
    ("Titan-RTX",       "RTX 20",   "pcie-3",         24220,  672,  130.5,  16.3, "TitanRTX"),
    ("A100-SXM4-40GB",  "A100",     "p4d.24xlarge",   40536, 1555,    312,  19.5,
     "A100-40GB A100-40 A100-SXM-40GB"),
    ("A100-SXM4-80GB",  "A100",     "dgx-a100",       81251, 2039,    312,  19.5,
     "A100 A100-SXM4 A100-80GB A100-80 A100-SXM"),
    ("A100-PCIe-40GB",  "A100",     "pcie-4",         40536, 1555,    312,  19.5, "A100-PCIe-40"),
    ("A100-PCIe-80GB",  "A100",     "pcie-4",         81251, 1935,    312,  19.5, "A100-PCIe A100-PCIe-80"),
    ("A800-SXM4-80GB",  "A800",     "octo-a800",      81251, 2039,    312,  19.5, "A800"),
    ("A10",             "A10, A30", "pcie-4",         22731,  600,    125,  31.2, "A10-24GB"),
    ("A10G",            "A10G",     "g5.48xlarge",    22731,  600,     70,    35, "A10G-24GB"),
    ("A30",             "A10, A30", "pcie-4",         24062,  933,    165,  10.3, "A30-24GB"),
    ("A40",             "A40",      "pcie-4",         45634,  696,  149.7,  37.4, "A40-48GB"),
    ("RTX-3090",        "RTX 30",   "pcie-4",         24268,  936,     71,  35.6, "GeForce-RTX-3090 RTX3090"),
    ("RTX-4090",        "RTX 40",   "pcie-4",         24217, 1008,  165.2,  82.6, "GeForce-RTX-4090 RTX4090"),
    ("L4",              "L4, L40S", "g6.48xlarge",    22700,  300,    121,  30.3, "L4-24GB"),
    ("L40",             "L4, L40S", "pcie-4",         45776,  864,    181,  90.5, "L40-48GB"),
    ("L40S",            "L4, L40S", "g6e.48xlarge",   45776,  864,    362,  91.6, "L40S-48GB"),
    ("H100-SXM5-80GB",  "H100",     "dgx-h100",       81090, 3350,  989.4,    67,
     "H100 H100-SXM H100-SXM5 H100-80GB H100-80GB-HBM3"),
    ("H100-PCIe-80GB",  "H100",     "pcie-5",         81090, 2000,    756,    51, "H100-PCIe"),
    ("H100-NVL-94GB",   "H100",     "pcie-5",         95830, 3900,  835.5,    60, "H100-NVL"),
    ("H800-SXM5-80GB",  "H800",     "octo-h800",      81090, 3350,  989.4,    67, "H800"),
    ("H200-SXM5-141GB", "H200",     "dgx-h200",      143167, 4800,  989.4,    67,
     "H200 H200-SXM H200-SXM5 H200-141GB"),
    ("H200-NVL-141GB",  "H200",     "pcie-5",        143167, 4800,  835.5,    60, "H200-NVL"),
    ("GH200-96GB",      "GH200",    "quad-gh200",     96768, 4000,  989.4,    67, "GH200 GH200-480GB"),
    ("GH200-144GB",     "GH200",    "quad-gh200",    146000, 4900,  989.4,    67, ""),
    ("B200-SXM-180GB",  "B200",     "dgx-b200",      182642, 8000,   2250,    75,
     "B200 B200-SXM B200-180GB B200-192GB"),
    ("GB200-186GB",     "GB200",    "quad-gb200",    189471, 8000,   2500,    80, "GB200"),
    ("B300-SXM-270GB",  "B300",     "dgx-b300",      275040, 7750,   2250,    75, "B300 B300-SXM B300-288GB"),
    ("GB300-278GB",     "B300",     "quad-gb300",    284208, 8000,   2500,    80, "GB300 GB300-288GB"),
    ("MI250X-die",      "MI250X",   "quad-mi250x",    65520, 1638,  191.5,  47.9,
     "MI250X MI250X-GCD MI250X-64GB"),
    ("MI300X",          "MI300X",   "octo-mi300x",   196592, 5300, 1307.4, 163.4, "MI300X-192GB"),
    # No data sheet: a guess, so that a CPU can be searched before it is measured with `search measure`.
    ("cpu-core",        GUESS,      "cpu",             8192,   10,   0.03,  0.03, "CPU"),
)  # fmt: skip


def _library_device(row: _Row) -> LibraryDevice:
    name, source, machine, memory_mib, memory_gb_per_s, half, single, aliases = row
    device = Device(
        name=name,
        memory_bytes=float(memory_mib * MIB),
        memory_bandwidth=memory_gb_per_s * 1e9,
        half_flops=half * 1e12,
        single_flops=single * 1e12,
        is_gpu=source != GUESS,
        generation=GENERATIONS[source],
    )
    return LibraryDevice(device=device, source=source, machine=machine, aliases=tuple(aliases.split()))


DEVICES: Mapping[str, LibraryDevice] = {row[0]: _library_device(row) for row in _ROWS}

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
