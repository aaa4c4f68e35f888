"""Share of the data sheet that is reached, the same for every strategy: the constants that calibration fits.

`HardwareEfficiency` holds constants of time, `memory.MemoryOverheads` of memory. `GENERATIONS` has the reach of
kernels on each generation of devices, relative to an A100.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_terapipe.devices import EIGHT_BITS, Device
from megatron_terapipe.search.price.layer_times import ScalarOrArray

RANKS = (2, 4, 8)
"""Numbers of ranks with a factor."""

BYTES = tuple(2**exponent for exponent in range(20, 28))
"""Bytes of messages with a factor: from 1 MiB, below which latencies dominate, to 128 MiB."""

NUM_REDUCTION_FACTORS = len(RANKS) * len(BYTES)
"""Number of factors."""


def reduction_factor(
    factors: tuple[ScalarOrArray, ...], num_bytes: ScalarOrArray, num_ranks: ScalarOrArray
) -> ScalarOrArray:
    """Return the factor of the seconds of a reduction; arguments broadcast.

    Args:
        factors: [ranks x bytes] at `RANKS` and `BYTES`, the bytes running fastest; numbers, or arrays of [n].
    """
    if all(isinstance(factor, float) and factor == 1.0 for factor in factors):
        return 1.0
    logs = np.log(np.array(factors)).reshape(len(RANKS), len(BYTES), -1)
    row, above_row = _place(num_ranks, RANKS)
    column, above_column = _place(num_bytes, BYTES)
    each = np.arange(logs.shape[2]) if logs.shape[2] > 1 else 0
    lower = (1 - above_column) * logs[row, column, each] + above_column * logs[row, column + 1, each]
    upper = (1 - above_column) * logs[row + 1, column, each] + above_column * logs[row + 1, column + 1, each]
    return np.asarray(np.exp((1 - above_row) * lower + above_row * upper))


def _place(value: ScalarOrArray, knots: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the index of the knot below a value, and the fraction of the way to the next; knots double."""
    way = np.clip(np.log2(np.maximum(value, 1e-9) / knots[0]), 0, len(knots) - 1)
    below = np.minimum(way.astype(np.int64), len(knots) - 2)
    return below, np.asarray(way - below)


def carried_by_network(num_ranks: ScalarOrArray, num_nodes: ScalarOrArray) -> ScalarOrArray:
    """Part of the bytes that the network cards of a node carry in one of the two rounds of an all-reduce over nodes.

    Between two nodes each sums inside and exchanges its sum with the other, so that the cards carry the bytes once in
    both rounds; among more, a tree carries as much as a ring. Arguments broadcast.
    """
    return np.where(np.equal(num_nodes, 2), 0.5, (num_ranks - 1) / num_ranks)


def constant(default: float | tuple[float, ...], width: float, words: str = "") -> Any:
    """Declare a constant, or a row of them, that calibration may fit; those without a declaration are never fitted.

    Args:
        width: standard deviation of its logarithm before any trial was seen.
        words: its name in answers.
    """
    return field(default=default, metadata={"width": width, "words": words})


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareEfficiency:
    """Constants of the cost model. None of them belongs to a strategy, a model or a row of a table.

    Times are products of these with the figures of `Device` and `Link`. Differences between generations of devices are
    separate factors relative to A100s (`GENERATIONS`, `roofline.FUSED_KERNELS`). The defaults are of A100s with
    Megatron, rounded:

    - `gemm_efficiency`: products of random numbers of 8192 x 8192 reach 0.825 of the peak for seconds, of zeros
      0.946, since the clock falls with power (A100, 400 W: thonking.ai/p/strangely-matrix-multiplications). Devices of
      a node differ by 5 %, and all wait for the slowest (github.com/stas00/ml-engineering, accelerator/README.md).
    - from fits to published trials, rounded by hand, so those trials are not held-out evidence: `misaligned_efficiency`
      (BigScience's chronicles, tr11), `attention_efficiency`, `memory_efficiency` (0.7 to 1.0), `launch_s`,
      `launch_jitter`, `launch_exposed`, `optimizer_passes` and `iteration_s` (vTrain's runs on one node);
      `network_efficiency` (0.06 to 0.9 over a dozen sites, so its prior is wide; 0.3 to 0.94 in published tests of
      links: nccl-tests/issues/152, 175 and 290).
    - `gemm_depth`, `gemm_area`: half a wave of 108 tiles of 128 x 256 is 1.8e6. Products of 1e10 FLOPs and more agree
      within 15 % with the cuBLAS times that aiconfigurator-core has of an A100; with less than 512 inputs cuBLAS is
      slower than this, by up to a half.
    - `inside_efficiency`, `collective_s`, `collective_fill_s`, and the latency of NVLink: 1,634 times that
      aiconfigurator-core 0.12.0 has of NCCL's all-reduce, reduce-scatter and all-gather of 1 MiB and more on 2 to 8
      A100, H100, H200, B200 and GB200, with a mean error of 13 to 17 % (`python -m benchmarks.kernel_efficiency`).
    - `transfer_inside_efficiency`: 80 of 450 GB/s on H100s, as NCCL sends by default (nccl-tests/issues/268).
    - `fused_attention`: the speed of the kernels outside of training.
    - the rest are guesses with wide priors.
    """

    gemm_efficiency: float = constant(0.78, 0.15, "speed of large products")
    """Share of the peak that large matrix products reach on an A100."""
    gemm_depth: float = 60.0
    """Inputs of a product at which half its time is prologue and epilogue of the tiles."""
    gemm_area: float = constant(1.0e6, 0.7, "size of a product that fills a device")
    """Rows x outputs of a product at which half its time is the unfilled part of the last wave of tiles."""
    attention_efficiency: float = constant(0.42, 0.4, "speed of attention written out")
    """Share of the peak that batched products of scores and values reach."""
    fused_attention: float = constant(1.0, 0.2, "speed of fused attention")
    """Speed of fused kernels of attention in training, relative to the kernel outside of training."""
    misaligned_efficiency: float = constant(0.1, 0.5, "speed of attention with odd head sizes")
    """Relative speed of attention with a head size that no tensor core can read (not a multiple of 8 numbers of 2
    bytes; NVIDIA, Deep Learning Performance Guide, Matrix Multiplication, section 2.1)."""
    memory_efficiency: float = constant(0.85, 0.25, "memory bandwidth of element-wise work")
    """Share of the memory bandwidth that element-wise work reaches on an A100."""
    launch_s: float = constant(30e-6, 0.7, "host time of a launch")
    """Host time of one launch, its share of Python and of autograd included."""
    launch_jitter: float = constant(0.1, 0.7, "delays between hosts of tensor-parallel ranks")
    """Delay of a host, as a share of its launches, for each doubling of the tensor-parallel ranks that wait for each
    other."""
    launch_exposed: float = constant(0.1, 1.0, "launches that ops do not hide")
    """Share of the shorter of launching and computing that the longer does not hide; 1 where the host waits for each
    kernel (CUDA_LAUNCH_BLOCKING)."""
    overlap_exposed: float = constant(0.1, 1.0, "communication that ops do not hide")
    """Exposed share of reductions and gathers under ops, as they take multiprocessors and memory bandwidth from the
    ops."""
    whole_loss_factor: float = constant(1.0, 0.7, "memory traffic of a whole vocabulary's loss")
    """Memory traffic of the loss where one rank has the whole vocabulary, relative to ranks that share it."""
    inside_efficiency: float = constant(0.75, 0.2, "bandwidth of collectives in a node")
    """Share of a link inside a node that collectives reach."""
    network_efficiency: float = constant(0.5, 0.7, "bandwidth of collectives between nodes")
    """Share of a network card that collectives reach."""
    transfer_inside_efficiency: float = constant(0.18, 0.5, "bandwidth between stages in a node")
    """Share of a link inside a node that it reaches: it takes few of its lanes at once."""
    transfer_network_efficiency: float = constant(0.8, 0.3, "bandwidth between stages on two nodes")
    """Share of a network card that one message between stages reaches."""
    host_efficiency: float = 0.8
    """Share of the link between a device and its host's page-locked memory that copies reach."""
    collective_s: float = constant(10e-6, 0.7, "start of a collective")
    """Start of a collective, in addition to the latency of its links."""
    collective_fill_s: float = 28e-6
    """Time for which the chunks of a large message fill the ring, in each round (`links.FILLING_BYTES`)."""
    transfer_s: float = 30e-6
    """Start of a message between stages, in addition to the latency of its link."""
    optimizer_passes: float = constant(1.8, 0.3, "memory traffic of the optimizer step")
    """Number of times that the optimizer step reads or writes the state of a parameter."""
    op_s: float = 0.0
    """Gap of the executor between two ops of a rank."""
    iteration_s: float = constant(0.003, 1.0, "fixed time of an iteration")
    """Fixed time of an iteration, whatever its size."""
    reductions: tuple[float, ...] = constant((1.0,) * NUM_REDUCTION_FACTORS, 0.25, "time of all-reduces in a node")
    """Seconds of reductions inside a node, relative to the formula; by ranks and bytes (`reduction_factor`)."""

    def exposed_s(self, messages_s: ScalarOrArray, ops_s: ScalarOrArray) -> ScalarOrArray:
        """Seconds that messages add to ops which they run under."""
        hidden = np.minimum(messages_s, ops_s)
        return messages_s - hidden + self.overlap_exposed * hidden


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelEfficiency:
    """Share of the data sheet that kernels reach on a generation of devices, outside of training."""

    products: float
    """Share of the peak of large matrix products, in half precision."""
    depth: float = 180.0
    """Inputs of a product at which half its time is prologue and epilogue of the tiles."""
    area: float
    """Rows x outputs of a product at which half its time is the unfilled part of the last wave of tiles."""
    memory: float
    processors: int
    """Multiprocessors, which compute a tile each; 1 in ratios."""
    is_measured: bool = False
    """Whether products are from a table of many sizes."""


REFERENCE = "ampere"
"""Generation of A100s."""

# fmt: off
GENERATIONS: Mapping[str, KernelEfficiency] = MappingProxyType({
    "pascal":    KernelEfficiency(products=0.45, area=1.7e5, memory=0.70, processors=56),
    "volta":     KernelEfficiency(products=0.63, area=2.4e5, memory=0.83, processors=80),
    "turing":    KernelEfficiency(products=0.37, area=1.2e5, memory=0.69, processors=40),
    "ampere":    KernelEfficiency(products=0.84, area=3.2e5, memory=0.79, processors=108, is_measured=True),
    "ada":       KernelEfficiency(products=0.59, area=3.2e5, memory=0.83, processors=142, is_measured=True),
    "hopper":    KernelEfficiency(products=0.71, area=2.0e5, memory=0.85, processors=132, is_measured=True),
    # Products: the tables have 0.66; 446 large ones of SimuMax, in shapes and layouts of training on a B200 with the
    # clocks that its power allows, 0.50 (github.com/MooreThreads/SimuMax, configs/system/b200_bf16_ceperm.json). The
    # geometric mean.
    "blackwell": KernelEfficiency(products=0.57, depth=130.0, area=5.0e5, memory=0.80, processors=148,
                                  is_measured=True),
    "cdna2":     KernelEfficiency(products=0.70, area=3.2e5, memory=0.80, processors=110),
    "cdna3":     KernelEfficiency(products=0.54, area=9.0e5, memory=0.79, processors=304),
})
"""Every generation of GPUs in `devices.GENERATION_NAMES`. Others, and CPUs, are priced by the constants as they
are."""

IN_EIGHT_BITS: Mapping[str, KernelEfficiency] = MappingProxyType({
    "ada":       KernelEfficiency(products=0.92, depth=1.0, area=1.0, memory=1.0, processors=1),
    "hopper":    KernelEfficiency(products=0.97, depth=3.8, area=6.2, memory=1.0, processors=1),
    "blackwell": KernelEfficiency(products=1.03, depth=8.5, area=9.2, memory=1.0, processors=1),
})
# fmt: on
"""Products in fp8 with one scale a tensor, relative to those in half precision, of cuBLAS and without the cast of an
operand, which its tables include (`python -m benchmarks.kernel_efficiency`). The largest that github.com/stas00's
ml-engineering measured reach 0.71 to 0.73 of the peak on H100 and H200 in fp8, 0.80 in bf16; 0.72 to 0.76 and 0.73 to
0.78 on Blackwell. A generation without a table has the same share of its peak in both. Scales of 32 numbers are
read by the tensor cores: training of Llama 3 8B on B200 is as fast within 5 % with either (pytorch/ao,
torchao/prototype/mx_formats/README.md)."""

GAMING_BOARDS = frozenset({"RTX-2080", "RTX-2080-Ti", "Titan-RTX", "RTX-4090"})

BOARD_PRODUCTS: Mapping[str, float] = MappingProxyType(
    {**dict.fromkeys(GAMING_BOARDS, 0.85), "B300-SXM-270GB": 0.62, "GB300-278GB": 0.65}
)
"""Share of large products on boards that are not as the entry of their generation. Those for games have more power than
the boards of the entries (T4, L40S), and their data sheet has the slower rate of sums in fp32: a guess. Blackwell Ultra
has more power too: 1.09 and 1.15 times the share in the same tables."""


AS_AN_A100 = KernelEfficiency(products=1.0, depth=1.0, area=1.0, memory=1.0, processors=1)


def relative_efficiency(device: Device, precision: str = "bf16") -> KernelEfficiency:
    """Return the efficiency of kernels on a device relative to an A100; 1 if its generation is unknown."""
    one, reference = GENERATIONS.get(device.generation), GENERATIONS[REFERENCE]
    if one is None:
        return AS_AN_A100
    products = BOARD_PRODUCTS.get(device.name, one.products)
    of_type = IN_EIGHT_BITS.get(device.generation, AS_AN_A100) if precision in EIGHT_BITS else AS_AN_A100
    return KernelEfficiency(
        products=products / reference.products * of_type.products,
        depth=one.depth / reference.depth * of_type.depth,
        area=one.area / reference.area * of_type.area,
        memory=one.memory / reference.memory,
        processors=1,
    )


def is_guessed(device: Device) -> bool:
    """Whether the efficiency of kernels on a device is not from a table of its generation: priors are then wider."""
    one = GENERATIONS.get(device.generation)
    return device.is_gpu and (one is None or not one.is_measured or device.name in GAMING_BOARDS)


def reachable_bandwidth(device: Device) -> float:
    """Bytes per second of a device's memory, such that `memory_efficiency` of it is reached as on an A100."""
    return device.memory_bandwidth * relative_efficiency(device).memory


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileFactors:
    """Seconds in training per second of the profile.

    Widths are guesses: for ops, wide enough for two ranks on the cores of one; for messages, for collectives
    that wait for a busy processor.
    """

    ops: float = constant(1.0, 0.4, "measured times of ops")
    """Of the ops of layers."""
    messages: float = constant(1.0, 0.8, "measured times of messages")
    """Of collectives and of messages between stages, beyond the latency of their links."""
    gaps: float = constant(1.0, 0.7, "measured gaps between ops")
    """Of the gaps of the executor between two ops of a rank."""
    step: float = constant(1.0, 0.5, "measured time of the optimizer step")
    """Of the end of an iteration: the optimizer, and the fixed time of an iteration."""

    def efficiency(self, measured: HardwareEfficiency) -> HardwareEfficiency:
        """HardwareEfficiency of training."""
        return replace(
            measured,
            inside_efficiency=measured.inside_efficiency / self.messages,
            network_efficiency=measured.network_efficiency / self.messages,
            transfer_inside_efficiency=measured.transfer_inside_efficiency / self.messages,
            transfer_network_efficiency=measured.transfer_network_efficiency / self.messages,
            collective_s=measured.collective_s * self.messages,
            transfer_s=measured.transfer_s * self.messages,
            op_s=measured.op_s * self.gaps,
            optimizer_passes=measured.optimizer_passes * self.step,
            iteration_s=measured.iteration_s * self.step,
        )
