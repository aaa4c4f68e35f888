"""What fused kernels of attention reach, by kernel, generation, head size and length.

A kernel computes a tile of 128 queries with the tokens that they see. For each row it works as long as `fixed` more
tokens would take: it starts and ends, and computes the masked half of the tiles on the diagonal. The last wave of tiles
fills the multiprocessors in part, which costs one wave. So attention of R rows that see `pairs` of tokens takes

    4 (pairs + fixed x R) heads x head size / (peak x share) x (1 + multiprocessors / tiles)

and a causal sequence of L tokens reaches share x L / (L + 2 fixed) of the peak, many tiles given. This form fits 3,000
times of each of a dozen kernels that the package aiconfigurator-core has with a mean error of 3 to 15 %, where the wave
is between 0.4 and 2.8 (`python -m benchmarks.kernel_efficiency`). Sources:

    flash-attention-1, which Triton's kernel of 2022 is, too
        ampere         the 25 to 40 % of arXiv 2307.08691 (abstract): 40 % forward, the backward at four fifths of it
        others         in the proportions of flash-attention-2
    flash-attention-2
        hopper         arXiv 2407.08608 figures 5 and 6: forward and backward, by length and head size
        ampere         forward: between the .60 and .69 of the package; backward, and other head sizes, in the
                       proportions of hopper. It reaches the 50 to 73 % forward and up to 63 % backward of arXiv
                       2307.08691 (abstract and section 4.1)
        ada            the package (L40S); backward in its proportion on an RTX 4090 (github.com/apache/tvm,
                       tl_doc/flash_perf.md)
        blackwell      github.com/Dao-AILab/flash-attention/issues/1589 for heads of 64, the rest as on hopper
        cdna2, cdna3   guesses
    flash-attention-3
        hopper         arXiv 2407.08608; the package agrees with its forward (.63 to .71)
    cudnn
        hopper         arXiv 2407.08608
        blackwell      forward: the package (.57 to .64); backward a guess
    memory-efficient
        ampere         in proportion to flash attention on one board, forward .62 to .8, backward .29 to .5
                       (github.com/Dao-AILab/flash-attention/issues/416)
        others         in the same proportion where flash attention runs; else guesses. On a V100 its forward is a
                       quarter faster than attention that is written out, its backward a fifth slower
                       (github.com/facebookresearch/xformers/pull/362)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from megatron_terapipe.search.inputs.cluster import Device
from megatron_terapipe.search.op_times.kernel_efficiency import GAMING_BOARDS, GAMING_PRODUCTS, GENERATIONS, REFERENCE
from megatron_terapipe.search.op_times.layer_times import ScalarOrArray

TILE = 128
"""Queries that a kernel computes at once."""

HEAD_SIZES = (64, 128, 256)
"""Head sizes of the shares below; between them they are interpolated."""

PADDED_TO = 32
"""Kernels exist for head sizes that are multiples of it, and others are computed as the next larger one."""


class Shares(NamedTuple):
    """Shares of the peak for heads of 64, 128 and 256 numbers, with long sequences."""

    small: float
    middle: float
    large: float

    def of(self, head_size: int) -> float:
        """Share for a head size, of the FLOPs of the head as it is."""
        padded = -(-head_size // PADDED_TO) * PADDED_TO
        return float(np.interp(padded, HEAD_SIZES, self)) * head_size / padded


@dataclass(frozen=True, slots=True)
class FusedKernel:
    """Speed of one kernel on one generation."""

    forward: Shares
    """Shares of the peak."""
    backward: Shares
    """Shares of the peak, of two and a half times the forward's FLOPs."""
    fixed: float
    """Tokens that each row takes longer in the forward."""
    fixed_backward: float
    """Tokens that each row takes longer in the backward."""


# fmt: off
FUSED_KERNELS: Mapping[tuple[str, str], FusedKernel] = MappingProxyType({
    ("flash-attention-2", "ampere"):    FusedKernel(Shares(.59, .66, .59), Shares(.58, .63, .50), 170, 330),
    ("flash-attention-2", "ada"):       FusedKernel(Shares(.50, .53, .55), Shares(.40, .42, .36), 240, 400),
    ("flash-attention-2", "hopper"):    FusedKernel(Shares(.32, .37, .34), Shares(.31, .35, .29), 165, 330),
    ("flash-attention-2", "blackwell"): FusedKernel(Shares(.18, .20, .19), Shares(.16, .18, .15), 165, 330),
    ("flash-attention-2", "cdna2"):     FusedKernel(Shares(.30, .35, .28), Shares(.20, .25, .18), 200, 400),
    ("flash-attention-2", "cdna3"):     FusedKernel(Shares(.30, .35, .28), Shares(.20, .25, .18), 200, 400),
    ("flash-attention-3", "hopper"):    FusedKernel(Shares(.51, .69, .74), Shares(.49, .63, .56), 240, 415),
    ("cudnn", "hopper"):                FusedKernel(Shares(.41, .59, .59), Shares(.46, .57, .51), 180, 385),
    ("cudnn", "blackwell"):             FusedKernel(Shares(.38, .61, .66), Shares(.33, .45, .38), 500, 700),
    ("flash-attention-1", "ampere"):    FusedKernel(Shares(.38, .40, .30), Shares(.30, .32, .22), 170, 330),
    ("flash-attention-1", "ada"):       FusedKernel(Shares(.32, .32, .25), Shares(.21, .21, .15), 240, 400),
    ("flash-attention-1", "hopper"):    FusedKernel(Shares(.21, .22, .17), Shares(.16, .18, .13), 165, 330),
    ("memory-efficient", "pascal"):     FusedKernel(Shares(.15, .13, .09), Shares(.09, .06, .04), 170, 330),
    ("memory-efficient", "volta"):      FusedKernel(Shares(.35, .31, .22), Shares(.22, .14, .09), 170, 330),
    ("memory-efficient", "turing"):     FusedKernel(Shares(.20, .18, .13), Shares(.13, .08, .05), 170, 330),
    ("memory-efficient", "ampere"):     FusedKernel(Shares(.47, .41, .30), Shares(.29, .18, .12), 170, 330),
    ("memory-efficient", "ada"):        FusedKernel(Shares(.40, .33, .25), Shares(.20, .12, .08), 240, 400),
    ("memory-efficient", "hopper"):     FusedKernel(Shares(.25, .22, .16), Shares(.15, .10, .06), 165, 330),
    ("memory-efficient", "blackwell"):  FusedKernel(Shares(.13, .12, .09), Shares(.08, .05, .03), 165, 330),
    ("memory-efficient", "cdna2"):      FusedKernel(Shares(.20, .20, .14), Shares(.12, .10, .06), 200, 400),
    ("memory-efficient", "cdna3"):      FusedKernel(Shares(.20, .20, .14), Shares(.12, .10, .06), 200, 400),
})
# fmt: on
"""By kernel and generation."""

RUNS_INSTEAD = {
    "flash-attention-3": "flash-attention-2",
    "cudnn": "flash-attention-2",
    "flash-attention-2": "memory-efficient",
    "flash-attention-1": "memory-efficient",
}
"""What runs on generations that a kernel is not made for."""

PLAIN_SHARE = 0.45
"""Share of the peak of a fused kernel in fp32, and of one on a CPU, however long the sequence. A guess."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedAttention:
    """A fused kernel on a device, for heads of one size."""

    forward: float
    """Share of the peak."""
    backward: float
    """Share of the peak."""
    fixed: float = 0.0
    """Tokens that each row takes longer in the forward."""
    fixed_backward: float = 0.0
    """Tokens that each row takes longer in the backward."""
    processors: int = 0
    """Multiprocessors that a wave of tiles fills; 0 on a CPU, which has none."""
    tile: int = 1
    """Queries that are computed at once."""

    def pairs_of_time(
        self,
        pairs: ScalarOrArray,
        rows: ScalarOrArray,
        tokens: ScalarOrArray,
        heads: ScalarOrArray,
        reach: ScalarOrArray,
    ) -> tuple[ScalarOrArray, ScalarOrArray]:
        """Pairs [...] of tokens that would take as long, forward and backward, if the share were reached at once.

        Args:
            pairs: [...] pairs of a token and one that it sees, of one head.
            rows: [...] tokens of all sequences.
            tokens: [...] those of one sequence.
            heads: [...] heads of all sequences.
            reach: [...] tokens that those of one sequence see, together.
        """
        filled = np.maximum(self.tile / tokens, 1.0)
        # The backward has a tile for each so many keys; a forward with fewer tiles than that divides the keys, too.
        filled = filled * (1 + self.processors * self.tile / (heads * np.maximum(reach, self.tile)))
        return (pairs + self.fixed * rows) * filled, (pairs + self.fixed_backward * rows) * filled


def kernel_that_runs(kernel: str, generation: str) -> str:
    """Name of the kernel that runs on devices of a generation where a trainer asks for another.

    Args:
        kernel: name of the kernel that the trainer asks for.
        generation: as in `devices.GENERATION_NAMES`; any other is taken to be an A100's.
    """
    generation = generation if generation in GENERATIONS else REFERENCE
    while (kernel, generation) not in FUSED_KERNELS:
        kernel = RUNS_INSTEAD[kernel]
    return kernel


def fused_attention(kernel: str, device: Device, precision: str, head_size: int) -> FusedAttention:
    """Return what a fused kernel reaches on a device.

    Args:
        kernel: name of the kernel that the trainer asks for.
        precision: `bf16`, `fp16` or `fp32`.
    """
    if precision == "fp32" or not device.is_gpu:
        return FusedAttention(forward=PLAIN_SHARE, backward=PLAIN_SHARE)
    generation = device.generation if device.generation in GENERATIONS else REFERENCE
    one = FUSED_KERNELS[kernel_that_runs(kernel, generation), generation]
    # Boards for games reach as much more of their peak in attention as in products.
    more = GAMING_PRODUCTS / GENERATIONS[generation].products if device.name in GAMING_BOARDS else 1.0
    return FusedAttention(
        forward=more * one.forward.of(head_size),
        backward=more * one.backward.of(head_size),
        fixed=one.fixed,
        fixed_backward=one.fixed_backward,
        processors=GENERATIONS[generation].processors,
        tile=TILE,
    )
