"""What kernels reach on each generation of devices, in that of an A100.

The constants of `HardwareEfficiency` are of A100s, for which there are most trials of training. A kernel alone is
faster than the same one in training, by about as much everywhere. So the level comes from trials, and what differs
between generations from tables of kernels alone: each figure of a generation counts relative to that of `ampere`.

From the package aiconfigurator-core 0.12.0 (NVIDIA, Apache-2.0), which has cuBLAS times of an A100, an L40S, an H100,
an H200, a B200 and a GB200 in three frameworks; `python -m benchmarks.kernel_efficiency` derives them again:

    products       share of the peak, from products of 1e11 FLOPs and more; H100 .75 to .82, GB200 .63 to .66
    depth, area    the form of `Roofline`, from products of 1e10 FLOPs and more; those of the L40S disagree, so Ampere's
    memory         share of the bandwidth at which a weight is read once

Products of an H100 alone reach .77. In training the same products reach .92 of that, relative to an A100: fits to
FSDP's published runs give .90 (H100 beside A100, one software) and to Megatron-core's .93. So hopper has .71. A board
of 700 W lowers its clock under a load that lasts, which a table of kernels does not see.

Links inside nodes have no entry: in the same package NCCL's reduce-scatter reaches .71 of NVLink on an A100, .75 on
H100 and H200, and .68 on a B200, which differ less than sizes of messages do.

Others:

    pascal         PyTorch sums products of half precision in fp32, at half the rate: .9 of that; memory 510 of 732 GB/s
    volta          97.4 of 125 TFLOP/s (github.com/zzc0721/torch-performance-test-data/issues/140); memory 750 of 900
    turing         24 of 65 TFLOP/s, because a T4 is held to 70 W (forums.developer.nvidia.com/t/
                   about-gpu-peak-performance/264462); memory 220 of 320
    cdna3          708 of 1307 TFLOP/s (AMD, Measuring Max-Achievable FLOPs, part 2); memory a guess
    cdna2          a guess

Memory of the first three is from Jia et al. (arXiv 1903.07486). Their areas are Ampere's by the number of
multiprocessors, because a wave has so many tiles.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megatron_terapipe.search.inputs.cluster import Device


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelEfficiency:
    """What kernels alone reach on a generation of devices."""

    products: float
    """Share of the peak of large matrix products, in half precision."""
    depth: float = 180.0
    """Inputs of a product at which half its time is prologue and epilogue of the tiles."""
    area: float
    """Rows x outputs of a product at which half its time is the unfilled part of the last wave of tiles."""
    memory: float
    """Share of the memory bandwidth."""
    processors: int
    """Multiprocessors, which compute a tile each."""
    is_measured: bool = False
    """Whether products are from a table of many sizes."""


REFERENCE = "ampere"
"""Generation of A100s."""

# fmt: off
GENERATIONS: Mapping[str, KernelEfficiency] = MappingProxyType({
    "pascal":    KernelEfficiency(products=0.45, area=1.7e5, memory=0.70, processors=56),
    "volta":     KernelEfficiency(products=0.78, area=2.4e5, memory=0.83, processors=80),
    "turing":    KernelEfficiency(products=0.37, area=1.2e5, memory=0.69, processors=40),
    "ampere":    KernelEfficiency(products=0.84, area=3.2e5, memory=0.79, processors=108, is_measured=True),
    "ada":       KernelEfficiency(products=0.59, area=3.2e5, memory=0.83, processors=142, is_measured=True),
    "hopper":    KernelEfficiency(products=0.71, area=2.0e5, memory=0.85, processors=132, is_measured=True),
    "blackwell": KernelEfficiency(products=0.66, depth=130.0, area=5.0e5, memory=0.80, processors=148,
                                  is_measured=True),
    "cdna2":     KernelEfficiency(products=0.70, area=3.2e5, memory=0.80, processors=110),
    "cdna3":     KernelEfficiency(products=0.54, area=9.0e5, memory=0.79, processors=304),
})
# fmt: on
"""Every generation of GPUs in `devices.GENERATION_NAMES`. Others, and CPUs, are priced by the constants as they
are."""

GAMING_PRODUCTS = 0.85
"""Share of large products on boards for games of the generations whose entries are of boards that are held to little
power (T4, L40S): their data sheet has the slower rate of sums in fp32, and they have the power for it. A guess."""

GAMING_BOARDS = frozenset({"RTX-2080", "RTX-2080-Ti", "Titan-RTX", "RTX-4090"})


@dataclass(frozen=True, kw_only=True, slots=True)
class RelativeEfficiency:
    """What kernels reach on a device, in what they reach on an A100."""

    products: float = 1.0
    """Share of the peak of large products."""
    depth: float = 1.0
    """Inputs of a product at which half its time is prologue and epilogue."""
    area: float = 1.0
    """Rows x outputs of a product at which half its time is unfilled."""
    memory: float = 1.0
    """Share of the memory bandwidth."""


AS_AN_A100 = RelativeEfficiency()


def relative_efficiency(device: Device) -> RelativeEfficiency:
    """What kernels reach on a device, in what they reach on an A100; 1 where its generation is not known."""
    one, reference = GENERATIONS.get(device.generation), GENERATIONS[REFERENCE]
    if one is None:
        return AS_AN_A100
    products = GAMING_PRODUCTS if device.name in GAMING_BOARDS else one.products
    return RelativeEfficiency(
        products=products / reference.products,
        depth=one.depth / reference.depth,
        area=one.area / reference.area,
        memory=one.memory / reference.memory,
    )


def is_guessed(device: Device) -> bool:
    """Whether what kernels reach on a device is from no table of its generation, so that priors should be wider."""
    one = GENERATIONS.get(device.generation)
    return device.is_gpu and (one is None or not one.is_measured or device.name in GAMING_BOARDS)


def reachable_bandwidth(device: Device) -> float:
    """Bytes per second of a device's memory, such that `memory_efficiency` of it is reached as on an A100."""
    return device.memory_bandwidth * relative_efficiency(device).memory
